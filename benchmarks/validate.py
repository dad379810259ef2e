"""Seconds until `python -m foundry` refuses an invalid configuration.

Each command is started several times in an empty folder. The table has the median seconds, processor seconds and number
of lines that the command prints to standard error. The command must exit with code 2 and leave no file behind.

Sweeps are started in turn with a second side, which checks all groups of each job, as for a run by itself. The last
column is the ratio of the processor seconds of both sides, after subtracting those of a sweep's only job.

    python benchmarks/validate.py [--repeats 5]
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from records import Column, Headline, Row, Values, finish, parser

MISTAKES = {
    "a misspelt key": ["hparams.leer=1e-3"],
    "a value out of bounds": ["hparams.lr=-1"],
    "batch sizes that do not divide": ["hparams.per_gpu_batch_size=7"],
    "four errors at once": ["hparams.leer=1", "scheduler=wds", "hparams.per_gpu_batch_size=7", "precision.mode=fp8"],
}
ONE_JOB = "a sweep's only job"
SWEEPS = {
    name: ["-m", f"hparams.seed=range(-1,{jobs - 1})"]
    for name, jobs in {ONE_JOB: 1, **{f"one of {jobs} jobs of a sweep": jobs for jobs in (10, 100, 500)}}.items()
}
EACH_ALONE = "--each-alone"
"""First argument of the process that runs foundry as the second side."""


@dataclass(frozen=True)
class Refusal:
    """Cost of a refused command: seconds, processor seconds, and lines on standard error."""

    seconds: float
    processor_seconds: float
    lines: int


def refuse(words: list[str], folder: Path, program: tuple[str, ...] = ("-m", "foundry")) -> Refusal:
    """Start a command in an empty folder, and wait for its end.

    Args:
        words: arguments of foundry.
        folder: the folder.
        program: arguments of Python that run foundry.
    """
    before, begin = os.times(), time.perf_counter()
    process = subprocess.run(
        [sys.executable, *program, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - begin, os.times()
    assert process.returncode == 2, process.stderr
    assert not any(folder.iterdir()), "a refused run leaves nothing behind"
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return Refusal(seconds, user + system, len(process.stderr.splitlines()))


def check_each_alone(words: list[str]) -> None:
    """Run foundry, and check all groups of each job of a sweep."""
    from foundry.commands.main import main as run
    from foundry.config.checks.group_checks import GroupCheck, GroupChecks

    GroupChecks.check = lambda self, composed, name: GroupCheck(composed, name)  # type: ignore[method-assign]
    sys.argv = ["foundry", *words]
    run()


COLUMNS = [
    Column(key="words", heading="words"),
    Column(key="seconds", heading="seconds", format=".2f", spread=True),
    Column(key="processor", heading="processor s", format=".2f", spread=True),
    Column(key="lines", heading="lines"),
    Column(key="of", heading="of each checked alone", format=".2f"),
]


def row(name: str, words: list[str], refusals: list[Refusal], **values: Values) -> Row:
    """Return the row of a command."""
    costs: dict[str, Values] = {
        "words": f"`{' '.join(words)}`",
        "seconds": [refusal.seconds for refusal in refusals],
        "processor": [refusal.processor_seconds for refusal in refusals],
        "lines": [refusals[0].lines],
    }
    return Row(side=name, values={**costs, **values})


def main() -> None:
    if sys.argv[1:2] == [EACH_ALONE]:
        check_each_alone(sys.argv[2:])
        return
    cli = parser(__doc__)
    cli.add_argument("--repeats", type=int, default=5)
    options = cli.parse_args()
    number = 1 if options.smoke else None
    repeats = 1 if options.smoke else options.repeats
    rows, only_job = list[Row](), 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, words in list(MISTAKES.items())[:number]:
            rows.append(row(name, words, [refuse(words, folder) for _ in range(repeats)]))
        for name, words in list(SWEEPS.items())[:number]:
            shared, alone = list[Refusal](), list[Refusal]()
            for _ in range(repeats):
                shared.append(refuse(words, folder))
                if name != ONE_JOB:
                    alone.append(refuse(words, folder, (__file__, EACH_ALONE)))
            costs = [statistics.median(side.processor_seconds for side in sides) for sides in (shared, alone) if sides]
            if name == ONE_JOB:
                (only_job,) = costs
                rows.append(row(name, words, shared))
            else:
                rows.append(row(name, words, shared, of=[(costs[0] - only_job) / (costs[1] - only_job)]))
                rows.append(row(f"{name}, each checked alone", words, alone))
    text = COLUMNS[1].cell(rows[0].values["seconds"]).partition(" ")[0]
    headline = Headline(what="A misspelt override is refused", foundry=f"after {text} s", beside="")
    finish(options, side="error", columns=COLUMNS, rows=rows, chart="seconds", headlines=[headline])


if __name__ == "__main__":
    main()
