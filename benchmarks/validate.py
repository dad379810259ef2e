"""Seconds until `python -m foundry` refuses an invalid configuration.

Each command is started several times in an empty folder. The table has the median seconds and the number of lines that
the command prints to standard error. The command must exit with code 2 and leave no file behind.

    python benchmarks/validate.py [--repeats 5]
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from records import Column, Headline, Row, Values, finish, parser

MISTAKES = {
    "a misspelt key": ["hparams.leer=1e-3"],
    "a value out of bounds": ["hparams.lr=-1"],
    "batch sizes that do not divide": ["hparams.per_gpu_batch_size=7"],
    "four errors at once": ["hparams.leer=1", "scheduler=wds", "hparams.per_gpu_batch_size=7", "precision.mode=fp8"],
    **{f"one of {jobs} jobs of a sweep": ["-m", f"hparams.seed=range(-1,{jobs - 1})"] for jobs in (1, 10, 100, 500)},
}


def refuse(words: list[str], folder: Path) -> tuple[float, int]:
    """Return the seconds until the command has ended, and the number of lines that it prints to standard error."""
    begin = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "foundry", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    assert process.returncode == 2, process.stderr
    assert not any(folder.iterdir()), "a refused run leaves nothing behind"
    return seconds, len(process.stderr.splitlines())


COLUMNS = [
    Column(key="words", heading="words"),
    Column(key="seconds", heading="seconds", format=".2f", spread=True),
    Column(key="lines", heading="lines"),
]


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--repeats", type=int, default=5)
    options = cli.parse_args()
    mistakes = dict(list(MISTAKES.items())[:1]) if options.smoke else MISTAKES
    repeats = 1 if options.smoke else options.repeats
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for name, words in mistakes.items():
            answers = [refuse(words, Path(folder)) for _ in range(repeats)]
            values: dict[str, Values] = {"words": f"`{' '.join(words)}`", "lines": [answers[0][1]]}
            rows.append(Row(side=name, values={**values, "seconds": [seconds for seconds, _ in answers]}))
    text = COLUMNS[1].cell(rows[0].values["seconds"]).partition(" ")[0]
    headline = Headline(what="A misspelt override is refused", foundry=f"after {text} s", beside="")
    finish(options, side="error", columns=COLUMNS, rows=rows, chart="seconds", headlines=[headline])


if __name__ == "__main__":
    main()
