"""`foundry report dir=DIR`: show the jobs of a sweep as a table, a picture, a CSV and a JSON file.

Exit code 0: all jobs have finished; 1: a job has failed or is lost; 3: no job has failed, but some have not finished.
"""

from dataclasses import dataclass

from rich.console import Console

from foundry.config.command import Outcome, command, runs_option
from foundry.config.setting import setting
from foundry.config.sources import is_url
from foundry.core.errors import ConfigError, Violation
from foundry.sweeps.reading import Which, read_sweep
from foundry.sweeps.report import read_settled, show, show_and_write, watch
from foundry.sweeps.report_files import PICTURE, report_facts


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of the command."""

    dir: str = setting("???", "directory of a sweep, a directory with run directories, or the URL of their mirrors")
    which: Which = setting(Which.last, "evaluation for the comparison of jobs: last or best")
    picture: bool = setting(True, f"draw {PICTURE}")
    watch: bool = setting(False, "update the table until no job is running or waiting")
    seconds: float = setting(2.0, "seconds between updates with watch", gt=0)


def print_report(options: ReportOptions) -> Outcome:
    """Print the state of a sweep and write its files, except for a URL or if Ctrl-C ended `watch`."""
    console, folder = Console(), runs_option("dir", options.dir)
    if is_url(options.dir):
        if options.watch:
            raise ConfigError(Violation("watch", "is true but dir is a URL; leave it out, and repeat the command"))
        sweep = read_sweep(folder, options.which)
        show(sweep, console)
    elif options.watch and not watch(folder, console, which=options.which, seconds=options.seconds):
        sweep = read_sweep(folder, options.which)
        show(sweep, console)
    else:
        sweep = read_settled(folder, options.which)
        show_and_write(sweep, console, picture=options.picture)
    return Outcome(report_facts(sweep), sweep.exit_code)


def main() -> None:
    """Entry point of the command."""
    command(ReportOptions, print_report, name="foundry.report", doc=__doc__.split(": ", 1)[1].strip())
