"""Seconds and memory of commands that read large files: five million rows of conversations, a million lines of metrics.

    python benchmarks/large_files.py [--rows 5000000] [--metrics 1000000]

`data=chats` is read by a run of one step, into an empty cache. `foundry diff` and `foundry report` read two runs with
a million lines of metrics each, `foundry export` one of them. Memory is the peak of the command's process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from records import Column, Row, finish, parser

COLUMNS = [Column(key="seconds", heading="s", format=",.1f"), Column(key="peak_mib", heading="peak MiB")]
RUN = ["debug=fast", "tracking=none", "hparams.max_steps=1", "data.seq_len=64"]
SMALL = ["model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=2"]
SMALL += ["model.num_kv_heads=2", "objective.sample_tokens=4", "evaluation.max_samples=8"]
TEXT = ["data=text", "data.path=chats.jsonl", "data.text_field=prompt", "data.vocab_size=300"]


def measure(folder: Path, module: str, *words: str) -> dict[str, list[float]]:
    """Run a command in a folder; return its seconds and its peak memory in MiB.

    Raises:
        CalledProcessError: the command failed. Exit code 1 of `foundry diff` is not a failure: it means that the runs
            differ.
    """
    start = time.perf_counter()
    environment = {**os.environ, "FOUNDRY_CACHE": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in ((0, 1) if module == "foundry.diff" else (0,)):
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return {"seconds": [time.perf_counter() - start], "peak_mib": [usage.ru_maxrss / 1024]}


def write_rows(file: Path, count: int) -> None:
    """Write conversations of one turn as JSONL."""
    with file.open("w") as stream:
        for number in range(count):
            row = {"prompt": f"Which number follows {number}?", "completion": f"After {number} comes {number + 1}."}
            stream.write(json.dumps(row) + "\n")


def lengthen(file: Path, count: int) -> None:
    """Replace the lines of a metrics.jsonl by `count` copies of its first line, with the steps from 1 to `count`."""
    record = json.loads(file.read_text().splitlines()[0])
    with file.open("w") as stream:
        for step in range(1, count + 1):
            stream.write(json.dumps(record | {"step": step, "samples": step * record["samples"]}) + "\n")


def main() -> None:
    """Measure each command and write a row for it."""
    cli = parser(__doc__)
    cli.add_argument("--rows", type=int, default=5_000_000, help="of conversations")
    cli.add_argument("--metrics", type=int, default=1_000_000, help="lines of each metrics.jsonl")
    options = cli.parse_args()
    num_rows, num_lines = (200, 100) if options.smoke else (options.rows, options.metrics)
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "chats.jsonl", num_rows)
        run = [*RUN, *SMALL] if options.smoke else RUN
        measure(
            folder, "foundry", *run, *(TEXT if options.smoke else ()), "-m", "hparams.seed=0,1", "hydra.sweep.dir=sweep"
        )
        runs = sorted(path.parent for path in (folder / "sweep").glob("*/metrics.jsonl"))
        chats = ["data=chats", "data.path=chats.jsonl", "objective=sft", f"data.tokenizer={runs[0]}"]
        read = {f"data=chats, {num_rows:,} rows": ("foundry", *run, *chats, "hydra.run.dir=tuned")}
        of_metrics = {
            "foundry.diff": (f"run={runs[0]}", f"against={runs[1]}"),
            "foundry.report": ("dir=sweep",),
            "foundry.export": (f"run={runs[0]}", "out=exported"),
        }
        for run_dir in runs:
            lengthen(run_dir / "metrics.jsonl", num_lines)
        for command, words in of_metrics.items():
            read[f"{command}, {num_lines:,} lines of metrics"] = (command, *words)
        for side, command_line in read.items():
            rows.append(Row(side=side, values=measure(folder, *command_line)))
    finish(options, side="command", columns=COLUMNS, rows=rows)


if __name__ == "__main__":
    main()
