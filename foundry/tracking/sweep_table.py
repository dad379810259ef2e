"""A sweep for people and scripts: the table, report.csv and report.json."""

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from foundry.records.strict_json import encode, write_atomically
from foundry.tracking.figures import duration
from foundry.tracking.sweep import Job, Sweep, Which

CSV, JSON = "report.csv", "report.json"
"""The files in a sweep's directory."""

_STYLES = {
    "finished": "green",
    "running": "cyan",
    "requeued": "cyan",
    "queued": "dim",
    "stopped": "yellow",
    "failed": "red",
    "lost": "red",
}
_FACTS = ("job", "state", "step", "total_steps", "seconds", "note", "run_dir")


@dataclass(frozen=True)
class _Column:
    name: str
    is_number: bool = False


def show(sweep: Sweep, console: Console) -> None:
    """Print the table and the summary; without colours, boxes and line breaks where nobody watches."""
    if console.is_terminal:
        console.print(screen(sweep))
        return
    for line in _plain(sweep):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for text in summary(sweep):
        console.print(text, soft_wrap=True)


def screen(sweep: Sweep) -> Group:
    """The jobs, the best first; below them what there is to say of some, and the summary."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=str(sweep.folder), title_justify="left", title_style="bold"
    )
    for column in _columns(sweep):
        is_log = column.name == "log"  # the first to be cut on a narrow screen
        side: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(column.name, justify=side, no_wrap=not is_log, overflow="ellipsis")
    for job in sweep.jobs:
        cells = [Text(cell) for cell in _cells(sweep, job)]
        cells[len(sweep.names) + 1].stylize(_STYLES.get(job.state, ""))
        if job.log.is_file():
            name = os.path.relpath(job.log, sweep.folder)
            cells[-1] = Text(name, style=f"dim link file://{job.log.resolve()}")
        table.add_row(*cells, style="bold" if job is sweep.best else "")
    notes = [
        Text(f"job {job.index}: ", style=_STYLES.get(job.state, "")) + Text(f"{job.note}; {os.path.relpath(job.log)}")
        for job in sweep.jobs
        if job.note
    ]
    return Group(table, *notes, *summary(sweep))


def summary(sweep: Sweep) -> Iterator[Text]:
    """How many jobs are in which state, which is the best, and how to repeat it."""
    states = [Text(f"{number} {state}", style=_STYLES.get(state, "")) for state, number in sweep.counts.items()]
    number = len(sweep.jobs)
    yield Text(f"{number} job{'s' * (number != 1)}: ") + Text(", ").join(states)
    best = sweep.best
    if best is None:
        yield Text(f"no job has a {sweep.metric} yet" if sweep.is_going else "no job has finished")
        return
    settled = "best" if best.state == "finished" else "best so far"
    name = f"best {sweep.metric}" if sweep.which is Which.best else sweep.metric
    said = [f"job {best.index}", f"{name} {metric_text(best.metric)}", sweep.settings(best)]
    yield Text(f"{settled}: ", style="bold") + Text(", ".join(part for part in said if part))
    yield Text("repeat: ", style="bold") + Text(sweep.repeat(best))


def metric_text(value: float | None) -> str:
    """Four decimals, or four digits where these would say little."""
    if value is None:
        return "-"
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e4 else f"{value:.4g}"


def write_csv(sweep: Sweep) -> Path:
    """A row per job: what was swept, how it stands, and every number of its result; an empty cell where none is."""
    results = [dict(_numbers(job.result)) for job in sweep.jobs]
    measured = list(dict.fromkeys(name for result in results for name in result if name not in _FACTS))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *sweep.names, *_FACTS[1:], "metric", *(name for name in measured if name != "metric")])
    for job, result in zip(sweep.jobs, results, strict=True):
        facts = _facts(sweep, job)
        values = [job.values.get(key) for key in sweep.names]
        numbers = [result.get(name) for name in measured if name != "metric"]
        writer.writerow([job.index, *values, *(facts[name] for name in _FACTS[1:]), job.metric, *numbers])
    path = sweep.folder / CSV
    write_atomically(path, text.getvalue())
    return path


def write_json(sweep: Sweep) -> Path:
    """The same for scripts, with the best job and the words of each."""
    best = sweep.best
    content = {
        "metric": sweep.metric,
        "direction": "minimize" if sweep.minimize else "maximize",
        "which": sweep.which.value,
        "counts": sweep.counts,
        "best": None if best is None else best.index,
        "repeat": None if best is None else sweep.repeat(best),
        "jobs": [
            _facts(sweep, job)
            | {
                "metric": job.metric,
                "swept": {key: job.values.get(key) for key in sweep.names},
                "overrides": job.overrides,
                "result": job.result,
            }
            for job in sweep.jobs
        ],
    }
    path = sweep.folder / JSON
    write_atomically(path, encode(content) + "\n")
    return path


def _facts(sweep: Sweep, job: Job) -> dict[str, Any]:
    return {
        "job": job.index,
        "state": job.state,
        "step": job.step,
        "total_steps": job.total_steps,
        "seconds": job.seconds,
        "note": job.note,
        "run_dir": os.path.relpath(job.run_dir, sweep.folder),
    }


def _numbers(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in result.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _columns(sweep: Sweep) -> list[_Column]:
    swept = [
        _Column(name, all(_is_number(job.values.get(key, "0")) for job in sweep.jobs))
        for key, name in sweep.names.items()
    ]
    measured = f"best {sweep.metric}" if sweep.which is Which.best else sweep.metric
    return [
        _Column("job", True),
        *swept,
        _Column("state"),
        _Column("step", True),
        _Column(measured, True),
        _Column("time", True),
        _Column("log"),
    ]


def _cells(sweep: Sweep, job: Job) -> list[str]:
    done = "-" if job.step is None else str(job.step)
    measured = metric_text(job.metric)
    if job.metric is not None and job.state != "finished":
        measured += "*"  # not of the whole run
    return [
        str(job.index),
        *(job.values.get(key, "-") for key in sweep.names),
        job.state,
        done if job.total_steps is None else f"{done}/{job.total_steps}",
        measured,
        "-" if job.seconds is None else duration(job.seconds),
        str(job.log) if job.log.is_file() else "-",
    ]


def _plain(sweep: Sweep) -> Iterator[str]:
    columns = _columns(sweep)
    columns.append(_Column("note"))
    rows = [[column.name for column in columns], *([*_cells(sweep, job), job.note] for job in sweep.jobs)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
