"""Peak memory of tokenising a corpus, by its size: python benchmarks/token_memory.py 25 100 [2000]

Each size, in MB, is a JSONL file of made-up words, tokenised in a process of its own into an empty cache: a tokenizer
is trained, documents are held out, both splits are encoded. The table has the peak resident memory above that of the
imports, and the seconds.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_WORDS, DOCUMENT_WORDS = 20_000, 300


def write_corpus(file: Path, num_bytes: int) -> None:
    """Documents of words, common ones more often, in lines of JSON."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(2, 9))) for _ in range(NUM_WORDS)]
    written, share = 0, [1 / (rank + 10) for rank in range(NUM_WORDS)]
    with file.open("w") as stream:
        while written < num_bytes:
            for _ in range(200):
                text = " ".join(draw.choices(words, share, k=DOCUMENT_WORDS))
                written += stream.write(json.dumps({"text": text}) + "\n")


def measure(file: str, cache: str) -> None:
    """Print what one process needed."""
    from foundry.data.text import text_files

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    splits = text_files(seed=0, path=file, seq_len=512, vocab_size=4096, tokenizer=None, held_out=0.05, cache_dir=cache)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"peak_mib": (after - before) / 1024, "seconds": time.perf_counter() - start}
    sys.stdout.write(json.dumps({**found, "tokens": splits.notes["train_tokens"]}) + "\n")


def main(sizes: list[int]) -> None:
    """Print a row for each size."""
    sys.stdout.write("| MB | training tokens | peak MiB above imports | s |\n|---|---|---|---|\n")
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder, "corpus.jsonl"), size * 10**6)
            command = [sys.executable, __file__, "--measure", str(Path(folder, "corpus.jsonl")), str(Path(folder, "c"))]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        row = f"| {size} | {found['tokens']:,} | {found['peak_mib']:.0f} | {found['seconds']:.0f} |\n"
        sys.stdout.write(row)
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main([int(size) for size in sys.argv[1:]])
