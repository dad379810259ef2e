"""How a sweep stands, on the terminal and in files: once, or again and again until no job runs any more."""

import math
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live

from foundry.core.errors import ConfigError
from foundry.launch.slurm_unwatched import settle_unwatched
from foundry.run_dir.redact import one_line
from foundry.sweeps.mlflow_parent import try_to_close_parent
from foundry.sweeps.reading import read_sweep
from foundry.sweeps.report_files import write_files
from foundry.sweeps.results import JobReport, SweepReport, Which
from foundry.sweeps.table import metric_text, screen, show

_SECONDS_BETWEEN_QUESTIONS = 15.0


def report(folder: Path, console: Console, *, which: Which = Which.last, picture: bool = True) -> int:
    """Print how a sweep stands and write its picture, CSV and JSON into its directory.

    Returns:
        0: all jobs have finished; 1: one has failed or is lost; 3: none has, and some have not finished.

    Raises:
        ConfigError: there are no jobs in the folder, or a file of the report's name that no report has written.
    """
    sweep = read_sweep(folder, which)
    show_and_write(sweep, console, picture=picture)
    return sweep.exit_code


def show_and_write(sweep: SweepReport, console: Console, *, picture: bool = True) -> None:
    """Print how a sweep stands and write its picture, CSV and JSON into its directory, if they can be written there.

    Raises:
        ConfigError: a file of the report's name that no report has written.
    """
    show(sweep, console)
    try:
        files = write_files(sweep, picture=picture)
    except ConfigError:  # a file that no report has written is kept
        raise
    except OSError as error:  # somebody else's sweep
        _say(console, f"no files written: {error}")
    except Exception as error:  # somebody else's numbers, which no picture can show
        _say(console, f"not all files written: {type(error).__name__}: {error}")
    else:
        _say(console, f"in {sweep.folder}: {', '.join(file.name for file in files)}")


def _say(console: Console, line: str) -> None:
    console.print(one_line(line), soft_wrap=True, markup=False, highlight=False)


def read_settled(folder: Path, which: Which) -> SweepReport:
    """The sweep as it stands now, after asking Slurm about jobs that nobody may be waiting for.

    Raises:
        ConfigError: there are no jobs in the folder.
    """
    sweep = read_sweep(folder, which)
    if not settle_unwatched([job.run_dir for job in sweep.jobs]):
        return sweep
    try_to_close_parent(folder)
    return read_sweep(folder, which)


@dataclass(kw_only=True)
class _Looks:
    """Reads a sweep again and again, and asks Slurm now and then about jobs that nobody may be waiting for."""

    folder: Path
    which: Which
    asked: float = -math.inf

    def read(self) -> SweepReport:
        """The sweep as it stands now."""
        if time.monotonic() - self.asked < _SECONDS_BETWEEN_QUESTIONS:
            return read_sweep(self.folder, self.which)
        self.asked = time.monotonic()
        return read_settled(self.folder, self.which)


def watch(folder: Path, console: Console, *, which: Which, seconds: float) -> bool:
    """Show the table, or a line for each change, until no job is running or waiting; False after Ctrl-C."""
    try:
        if console.is_terminal:
            _watch_table(_Looks(folder=folder, which=which), console, seconds)
        else:
            _watch_changes(_Looks(folder=folder, which=which), console, seconds)
    except KeyboardInterrupt:
        return False
    return True


def _watch_table(looks: _Looks, console: Console, seconds: float) -> None:
    sweep = looks.read()
    with Live(screen(sweep, console, scrolls=False), console=console, auto_refresh=False, transient=True) as live:
        while sweep.is_going:
            time.sleep(seconds)
            sweep = looks.read()
            live.update(screen(sweep, console, scrolls=False), refresh=True)


def _watch_changes(looks: _Looks, console: Console, seconds: float) -> None:
    known = dict[int, str]()
    while True:
        sweep = looks.read()
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
