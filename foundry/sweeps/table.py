"""A sweep on the terminal: a row for each job, what there is to say of some, and the summary."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from foundry.config.composition.job_overrides import brief, parse_number
from foundry.core.errors import listed
from foundry.run_dir.redact import one_line
from foundry.sweeps.results import JobReport, SweepReport
from foundry.sweeps.seeds import SeedGroup, is_seed, seed_groups
from foundry.tracking.humanize import duration

_STYLES = {
    "finished": "green",
    "running": "cyan",
    "requeued": "cyan",
    "queued": "dim",
    "stopped": "yellow",
    "failed": "red",
    "lost": "red",
}
_MOST_NUMBERS = 8  # of jobs with the same note
_ANY_WIDTH = 10_000
_ROWS_BESIDES = 6  # title, head and lines around the jobs of a table


@dataclass(frozen=True)
class _Column:
    name: str
    is_number: bool = False


def show(sweep: SweepReport, console: Console) -> None:
    """Print the table and the summary; without colours, boxes and line breaks where nobody watches."""
    if console.is_terminal:
        console.print(screen(sweep, console))
        return
    for line in [*_plain(sweep), *_plain_seeds(sweep)]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for text in summary(sweep):
        console.print(text, soft_wrap=True)


def screen(sweep: SweepReport, console: Console, *, scrolls: bool = True) -> Group:
    """The jobs, the best first; below them what there is to say of some, and the summary.

    Args:
        sweep: as it stands.
        console: where it is shown; without the logs' names where it is narrow.
        scrolls: False: leave out jobs where the console is too low for all.
    """
    below: list[ConsoleRenderable] = [*_seeds_table(sweep), *_notes(sweep), *summary(sweep)]
    jobs: Sequence[JobReport] = sweep.jobs
    if not scrolls:
        used = _ROWS_BESIDES + len(console.render_lines(Group(*below)))
        jobs = _most_telling(jobs, max(console.height - used, 3))
    left_out = len(sweep.jobs) - len(jobs)
    message: list[ConsoleRenderable] = [Text(f"and {left_out} more jobs", style="dim")] if left_out else []
    table = _table(sweep, jobs)
    if console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum > console.width:
        table = _table(sweep, jobs, with_log=False)
    title = Text(one_line(str(sweep.folder)), style="bold", no_wrap=True, overflow="ellipsis")
    return Group(title, table, *message, *below)


def summary(sweep: SweepReport) -> Iterator[Text]:
    """How many jobs are in which state, which is the best, and how to repeat it."""
    states = [Text(f"{number} {state}", style=_STYLES.get(state, "")) for state, number in sweep.counts.items()]
    number = len(sweep.jobs)
    pruned = sum(job.is_pruned for job in sweep.jobs)
    also = f"; {pruned} of them pruned" if pruned else ""
    yield Text(f"{number} job{'s' * (number != 1)}: ") + Text(", ").join(states) + Text(also)
    arrays = dict.fromkeys(job.slurm_id.partition("_")[0] for job in sweep.jobs if job.slurm_id)
    if arrays:
        yield Text(f"in Slurm: squeue --jobs={','.join(arrays)}")
    best = sweep.best
    if best is None:
        yield Text(why_no_best(sweep))
        return
    settled = "best" if best.is_complete else "best so far"
    message = [f"job {best.index}", f"{sweep.metric_name} {metric_text(best.metric)}", sweep.settings(best)]
    yield Text(f"{settled}: ", style="bold") + Text(", ".join(part for part in message if part))
    if (groups := seed_groups(sweep)) and groups[0].std is not None:
        yield Text("best over seeds: ", style="bold") + Text(_over_seeds(sweep, groups[0]))
    yield Text("repeat: ", style="bold") + Text(one_line(sweep.repeat(best)))


def _over_seeds(sweep: SweepReport, group: SeedGroup) -> str:
    """`lr=0.01, val_loss 0.3989 ± 0.0021 of 3 seeds`."""
    settings = " ".join(f"{sweep.names[key]}={brief(value)}" for key, value in group.values.items())
    measured = (
        f"{sweep.metric_name} {metric_text(group.mean)} ± {metric_text(group.std)} of {len(group.measured)} seeds"
    )
    return ", ".join(part for part in (settings, measured) if part)


def why_no_best(sweep: SweepReport) -> str:
    """What is said in place of the best job where there is none."""
    if not sweep.metric:
        return "no metric to compare jobs by (evaluation.metric is null)"
    if sweep.is_going:
        return f"no job has a {sweep.metric} yet"
    have_finished = any(job.state == "finished" for job in sweep.jobs)
    return f"no job has a finite {sweep.metric}" if have_finished else "no job has finished"


def metric_text(value: float | None) -> str:
    """Four decimals, or four digits where these would say little."""
    if value is None:
        return "-"
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e4 else f"{value:.4g}"


def _table(sweep: SweepReport, jobs: Sequence[JobReport], *, with_log: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = _columns(sweep) if with_log else _columns(sweep)[:-1]
    for column in columns:
        is_cut_first = column.name in sweep.names.values()  # on a narrow screen
        side: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(column.name, justify=side, no_wrap=not is_cut_first, overflow="ellipsis")
    for job in jobs:
        cells = [Text(cell) for cell in _cells(sweep, job)]
        cells[len(sweep.names) + 1].stylize(_STYLES.get(job.state, ""))
        if job.log.is_file() and str(job.log.resolve()).isprintable():
            link = f"link file://{job.log.resolve()}"
            cells[0].stylize(link)
            cells[-1] = Text(os.path.relpath(job.log, sweep.folder), style=f"dim {link}")
        table.add_row(*cells[: len(columns)], style="bold" if job is sweep.best else "")
    return table


def _seeds_table(sweep: SweepReport) -> Iterator[Table]:
    """Mean and standard deviation over seeds, on a terminal; nothing where no seed is swept."""
    if rows := list(_seed_rows(sweep)):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in _seed_columns(sweep):
            table.add_column(column.name, justify="right" if column.is_number else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        yield table


def _seed_columns(sweep: SweepReport) -> list[_Column]:
    columns = [_swept_column(sweep, key) for key in sweep.names if not is_seed(key)]
    return [*columns, *(_Column(name, True) for name in ("seeds", f"mean {sweep.metric_name}", "std"))]


def _seed_rows(sweep: SweepReport) -> Iterator[list[str]]:
    """A row for each setting: its values, how many of its seeds are measured, mean and standard deviation."""
    for group in seed_groups(sweep):
        settings = [brief(group.values.get(key, "-")) for key in sweep.names if not is_seed(key)]
        count = f"{len(group.measured)}/{len(group.jobs)}"
        yield [*settings, count, metric_text(group.mean), metric_text(group.std)]


def _most_telling(jobs: Sequence[JobReport], number: int) -> Sequence[JobReport]:
    """So many of the jobs, in their order: those that run, then from the top."""
    chosen = {job.index for job in sorted(jobs, key=lambda job: job.state != "running")[:number]}
    return [job for job in jobs if job.index in chosen]


def _notes(sweep: SweepReport) -> Iterator[Text]:
    """What there is to say of jobs, once for those of which it is the same."""
    by_note: dict[str, list[JobReport]] = {}
    for job in sweep.jobs:
        if job.note:
            by_note.setdefault(job.note, []).append(job)
    for note, jobs in by_note.items():
        numbers = listed([job.index for job in jobs], _MOST_NUMBERS)
        message = Text(f"job{'s' * (len(jobs) > 1)} {numbers}: ", style=_STYLES.get(jobs[0].state, ""))
        log = next((f"; {one_line(os.path.relpath(job.log))}" for job in jobs if job.log.is_file()), "")
        yield message + Text(f"{note}{log}")


def _columns(sweep: SweepReport) -> list[_Column]:
    return [
        _Column("job", True),
        *(_swept_column(sweep, key) for key in sweep.names),
        _Column("state"),
        _Column("step", True),
        _Column(sweep.metric_name, True),
        *([_Column("interval", True)] if sweep.has_intervals else []),
        _Column("time", True),
        _Column("log"),
    ]


def _swept_column(sweep: SweepReport, key: str) -> _Column:
    are_numbers = not any(math.isnan(parse_number(job.values.get(key, "0"))) for job in sweep.jobs)
    return _Column(sweep.names[key], are_numbers)


def _cells(sweep: SweepReport, job: JobReport) -> list[str]:
    done = "-" if job.step is None else str(job.step)
    measured = metric_text(job.metric)
    if job.metric is not None and not job.is_complete:
        measured += "*"  # not of the whole run
    return [
        str(job.index),
        *(brief(job.values.get(key, "-")) for key in sweep.names),
        job.state,
        done if job.total_steps is None else f"{done}/{job.total_steps}",
        measured,
        *([_interval_text(job)] if sweep.has_intervals else []),
        "-" if job.seconds is None else duration(job.seconds),
        one_line(str(job.log)) if job.log.is_file() else "-",
    ]


def _interval_text(job: JobReport) -> str:
    return "-" if job.interval is None else " to ".join(map(metric_text, job.interval))


def _plain(sweep: SweepReport) -> Iterator[str]:
    return _aligned([*_columns(sweep), _Column("note")], [[*_cells(sweep, job), job.note] for job in sweep.jobs])


def _plain_seeds(sweep: SweepReport) -> Iterator[str]:
    if rows := list(_seed_rows(sweep)):
        yield ""
        yield from _aligned(_seed_columns(sweep), rows)
        yield ""


def _aligned(columns: Sequence[_Column], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    rows = [[column.name for column in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        yield "  ".join(padded).rstrip()
