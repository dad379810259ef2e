"""A small file for each kind of data, and a trained base model."""

import json
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np

STORED = Path(__file__).parents[1] / "stored"


def write_small_files(folder: Path) -> None:
    """Write text, rows, tokens, images, episodes and the run `base` into an empty folder.

    Names and bytes are the same on every machine and must not change: records in `tests/evidence/table.json` and the
    run directories in `tests/stored` depend on them.
    """
    numbers = range(60)
    lines = [f"{n} times {n + 1} is {n * (n + 1)}." for n in numbers]
    (folder / "text.txt").write_text("\n".join(lines))
    _write_rows(folder / "more.jsonl", [{"text": f"{line} And so on."} for line in lines])
    pairs = [{"prompt": f"{n} times 7?", "completion": f"{7 * n}", "answer": f"{7 * n}"} for n in numbers]
    _write_rows(folder / "chats.jsonl", pairs)
    _write_rows(folder / "prompts.jsonl", [{key: row[key] for key in ("prompt", "answer")} for row in pairs])
    preferences = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{row['answer']}0 or so"} for row in pairs
    ]
    _write_rows(folder / "preferences.jsonl", preferences)
    np.tile(np.arange(257, dtype="<u2"), 8).tofile(folder / "tokens.bin")
    for label in ("dark", "light"):
        (folder / "images" / label).mkdir(parents=True)
        for n in range(4):
            (folder / "images" / label / f"{n}.png").write_bytes(_grey_png(16, 10 * n + 200 * (label == "light")))
    questions = [
        {"image": f"images/dark/{n % 4}.png", "prompt": "How dark?", "completion": f"{n % 4}"} for n in numbers
    ]
    _write_rows(folder / "looked.jsonl", questions)
    shutil.copytree(STORED / "lerobot-0.4.4" / "image", folder / "lerobot")
    shutil.copytree(STORED / "run-0.1", folder / "base", symlinks=True)
    config = folder / "base" / "config.yaml"
    config.write_text(config.read_text().replace("seq_len: 32", "seq_len: 256"))


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _grey_png(size: int, grey: int) -> bytes:
    """Return a uniform gray PNG, uncompressed, since compressed bytes would depend on the zlib version."""
    rows = (b"\0" + bytes([grey]) * size) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, level=0)), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)
