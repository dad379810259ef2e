"""Report of a sweep's state on the terminal and in files, once or repeatedly until no job is running or will start."""

import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from foundry.config.composition.job_overrides import brief, parse_number
from foundry.core.errors import ConfigError, listed
from foundry.launch.slurm.unwatched import settle_unwatched
from foundry.run_dir.redact import one_line
from foundry.sweeps.parameters import metric_text, no_best_reason
from foundry.sweeps.reading import JobReport, SweepReport, Which, read_sweep
from foundry.sweeps.report_files import write_files
from foundry.sweeps.seeds import SeedGroup, is_seed, seed_groups
from foundry.tracking.humanize import duration

_STYLES = {
    "finished": "green",
    "running": "cyan",
    "paused": "blue",
    "requeued": "cyan",
    "queued": "dim",
    "stopped": "yellow",
    "failed": "red",
    "lost": "red",
}
_MOST_NUMBERS = 8  # maximum number of jobs listed for one note
_ANY_WIDTH = 10_000
_ROWS_BESIDES = 6  # rows of the title, header and rules around a table of jobs
_SECONDS_BETWEEN_QUESTIONS = 15.0


def report(folder: Path, console: Console, *, which: Which = Which.last, picture: bool = True) -> int:
    """Print the state of a sweep and write its plot, CSV and JSON into its directory.

    Returns:
        Exit code: 0 if all jobs have finished, 1 if one has failed or is lost, 3 otherwise.

    Raises:
        ConfigError: if the folder has no jobs, or contains a file with a report's name that is not a report.
    """
    sweep = read_sweep(folder, which)
    show_and_write(sweep, console, picture=picture)
    return sweep.exit_code


def show_and_write(sweep: SweepReport, console: Console, *, picture: bool = True) -> None:
    """Print the state of a sweep and write its plot, CSV and JSON into its directory, if it is writable.

    Raises:
        ConfigError: if the directory contains a file with a report's name that is not a report.
    """
    show(sweep, console)
    try:
        files = write_files(sweep, picture=picture)
    except ConfigError:  # a file that is not a report must not be overwritten
        raise
    except OSError as error:  # for example the directory of another user
        _say(console, f"no files written: {error}")
    except Exception as error:  # for example values that cannot be plotted
        _say(console, f"not all files written: {type(error).__name__}: {error}")
    else:
        _say(console, f"in {sweep.folder}: {', '.join(file.name for file in files)}")


def _say(console: Console, line: str) -> None:
    console.print(one_line(line), soft_wrap=True, markup=False, highlight=False)


def read_settled(folder: Path, which: Which) -> SweepReport:
    """Return the state of a sweep after asking Slurm about its unfinished jobs, since their launcher may have ended.

    Raises:
        ConfigError: if the folder has no jobs.
    """
    sweep = read_sweep(folder, which)
    if not settle_unwatched([job.run_dir for job in sweep.jobs]):
        return sweep
    from foundry.sweeps.mlflow_parent import try_to_close_parent

    try_to_close_parent(folder)
    return read_sweep(folder, which)


@dataclass(kw_only=True)
class _SweepPoller:
    """Repeated reads of a sweep, with a Slurm query for its unfinished jobs at most every 15 seconds."""

    folder: Path
    which: Which
    last_request: float = -math.inf

    def read(self) -> SweepReport:
        """Return the current state of the sweep."""
        if time.monotonic() - self.last_request < _SECONDS_BETWEEN_QUESTIONS:
            return read_sweep(self.folder, self.which)
        self.last_request = time.monotonic()
        return read_settled(self.folder, self.which)


def watch(folder: Path, console: Console, *, which: Which, seconds: float) -> bool:
    """Show a live table, or print each change of state, until no job is running or will start; False after Ctrl-C."""
    try:
        if console.is_terminal:
            _watch_table(_SweepPoller(folder=folder, which=which), console, seconds)
        else:
            _watch_changes(_SweepPoller(folder=folder, which=which), console, seconds)
    except KeyboardInterrupt:
        return False
    return True


def _watch_table(poller: _SweepPoller, console: Console, seconds: float) -> None:
    sweep = poller.read()
    with Live(screen(sweep, console, scrolls=False), console=console, auto_refresh=False, transient=True) as live:
        while sweep.is_going:
            time.sleep(seconds)
            sweep = poller.read()
            live.update(screen(sweep, console, scrolls=False), refresh=True)


def _watch_changes(poller: _SweepPoller, console: Console, seconds: float) -> None:
    known = dict[int, str]()
    while True:
        sweep = poller.read()
        for job in sorted(sweep.jobs, key=lambda job: job.index):
            if known.get(job.index, "queued") != job.state:
                _say(console, _change(sweep, job))
            known[job.index] = job.state
        if not sweep.is_going:
            return
        time.sleep(seconds)


def _change(sweep: SweepReport, job: JobReport) -> str:
    text = f"{datetime.now():%H:%M:%S} job {job.index} {job.state}"
    step = f"step {job.step}" if job.step is not None else ""
    measured = f"{sweep.metric} {metric_text(job.metric)}" if job.metric is not None else ""
    return ", ".join(part for part in (text, sweep.settings(job), step, measured, job.note) if part)


@dataclass(frozen=True)
class _Column:
    name: str
    is_number: bool = False


def show(sweep: SweepReport, console: Console) -> None:
    """Print the table and the summary; without colors, boxes and line breaks if the output is not a terminal."""
    if console.is_terminal:
        console.print(screen(sweep, console))
        return
    for line in [*_plain_lines(sweep), *_plain_seed_lines(sweep)]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for text in summary(sweep):
        console.print(text, soft_wrap=True)


def screen(sweep: SweepReport, console: Console, *, scrolls: bool = True) -> Group:
    """Return the table of jobs, the best first, with notes on jobs and the summary below it.

    Args:
        sweep: the state of the sweep.
        console: console for the output; if it is narrow, the column of log files is omitted.
        scrolls: if False, omit jobs that do not fit the height of the console.
    """
    below: list[ConsoleRenderable] = [*_seeds_table(sweep), *_notes(sweep), *summary(sweep)]
    jobs: Sequence[JobReport] = sweep.jobs
    if not scrolls:
        used = _ROWS_BESIDES + len(console.render_lines(Group(*below)))
        jobs = _select_jobs(jobs, max(console.height - used, 3))
    left_out = len(sweep.jobs) - len(jobs)
    message: list[ConsoleRenderable] = [Text(f"and {left_out} more jobs", style="dim")] if left_out else []
    table = _table(sweep, jobs)
    if console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum > console.width:
        table = _table(sweep, jobs, with_log=False)
    title = Text(one_line(str(sweep.folder)), style="bold", no_wrap=True, overflow="ellipsis")
    return Group(title, table, *message, *below)


def summary(sweep: SweepReport) -> Iterator[Text]:
    """Yield the lines of the summary: number of jobs by state, the best job, and the command that repeats it."""
    states = [Text(f"{number} {state}", style=_STYLES.get(state, "")) for state, number in sweep.counts.items()]
    number = len(sweep.jobs)
    pruned = sum(job.is_pruned for job in sweep.jobs)
    also = f"; {pruned} of them pruned" if pruned else ""
    yield Text(f"{number} job{'s' * (number != 1)}: ") + Text(", ").join(states) + Text(also)
    arrays = dict.fromkeys(job.slurm_id.partition("_")[0] for job in sweep.jobs if job.slurm_id)
    if arrays:
        yield Text(f"in Slurm: squeue --jobs={','.join(arrays)}")
    resources = [job.kubernetes_job for job in sweep.jobs if job.kubernetes_job]
    if resources:
        names = [str(resource.get("job_id")) for resource in resources]
        command = shlex.join(["kubectl", "get", f"--namespace={resources[0].get('namespace')}", *names])
        yield Text(one_line(f"in Kubernetes: {command}"))
    best = sweep.best
    if best is None:
        yield Text(no_best_reason(sweep))
        return
    settled = "best" if best.is_complete else "best so far"
    message = [f"job {best.index}", f"{sweep.metric_name} {metric_text(best.metric)}", sweep.settings(best)]
    yield Text(f"{settled}: ", style="bold") + Text(", ".join(part for part in message if part))
    if (groups := seed_groups(sweep)) and groups[0].std is not None:
        yield Text("best over seeds: ", style="bold") + Text(_seeds_text(sweep, groups[0]))
    yield Text("repeat: ", style="bold") + Text(one_line(sweep.repeat(best)))


def _seeds_text(sweep: SweepReport, group: SeedGroup) -> str:
    """Return the result of a seed group, such as `lr=0.01, val_loss 0.3989 ± 0.0021 of 3 seeds`."""
    settings = " ".join(f"{sweep.names[key]}={brief(value)}" for key, value in group.values.items())
    measured = (
        f"{sweep.metric_name} {metric_text(group.mean)} ± {metric_text(group.std)} of {len(group.measured)} seeds"
    )
    return ", ".join(part for part in (settings, measured) if part)


def _table(sweep: SweepReport, jobs: Sequence[JobReport], *, with_log: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = _columns(sweep) if with_log else _columns(sweep)[:-1]
    for column in columns:
        is_cut_first = column.name in sweep.names.values()  # shortened first on a narrow screen
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
    """Yield a table of mean and standard deviation over seeds; nothing if no setting has several seeds."""
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
    """Yield a row for each setting: its values, numbers of measured and of all seeds, mean and standard deviation."""
    for group in seed_groups(sweep):
        settings = [brief(group.values.get(key, "-")) for key in sweep.names if not is_seed(key)]
        count = f"{len(group.measured)}/{len(group.jobs)}"
        yield [*settings, count, metric_text(group.mean), metric_text(group.std)]


def _select_jobs(jobs: Sequence[JobReport], number: int) -> Sequence[JobReport]:
    """Return at most `number` jobs in their order: all running jobs, if they fit, and the first of the other jobs."""
    chosen = {job.index for job in sorted(jobs, key=lambda job: job.state != "running")[:number]}
    return [job for job in jobs if job.index in chosen]


def _notes(sweep: SweepReport) -> Iterator[Text]:
    """Yield the notes on jobs; jobs with equal notes share one line."""
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
        *([_Column("rung", True)] if sweep.has_rungs else []),
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
        measured += "*"  # not measured at the end of a complete run
    return [
        str(job.index),
        *(brief(job.values.get(key, "-")) for key in sweep.names),
        job.state,
        done if job.total_steps is None else f"{done}/{job.total_steps}",
        measured,
        *([_interval_text(job)] if sweep.has_intervals else []),
        *(["-" if job.rung is None else str(job.rung)] if sweep.has_rungs else []),
        "-" if job.seconds is None else duration(job.seconds),
        one_line(str(job.log)) if job.log.is_file() else "-",
    ]


def _interval_text(job: JobReport) -> str:
    return "-" if job.interval is None else " to ".join(map(metric_text, job.interval))


def _plain_lines(sweep: SweepReport) -> Iterator[str]:
    return _align([*_columns(sweep), _Column("note")], [[*_cells(sweep, job), job.note] for job in sweep.jobs])


def _plain_seed_lines(sweep: SweepReport) -> Iterator[str]:
    if rows := list(_seed_rows(sweep)):
        yield ""
        yield from _align(_seed_columns(sweep), rows)
        yield ""


def _align(columns: Sequence[_Column], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    rows = [[column.name for column in columns], *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        yield "  ".join(padded).rstrip()
