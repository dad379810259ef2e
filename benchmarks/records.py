"""Records of benchmarks: `benchmarks/results/<name>.json`, the source of the documentation's tables and charts.

A record has machine, date, command and commit of a measurement, the meaning of its columns, and the values of every
round; medians and spreads are computed for display.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "torchdata", "trl")

Values: TypeAlias = "Sequence[float] | str | None"
"""Content of a cell: one value per round, or text; None for an empty cell."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Column of a table.

    Attributes:
        key: key in `Row.values`.
        heading: heading with the unit.
        format: format of a number for Python's `format`.
        spread: show the smallest and the largest value next to the median.
    """

    key: str
    heading: str
    format: str = ",.0f"
    spread: bool = False

    def cell(self, values: Values) -> str:
        """Return the text of a cell of this column, given its values."""
        if values is None or isinstance(values, str):
            return values or ""
        middle, least, most = (format(each, self.format) for each in (statistics.median(values), *_ends(values)))
        return f"{middle} ({least} to {most})" if self.spread and least != most else middle


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side of a comparison under one condition.

    Attributes:
        case: the condition; rows of the same case are compared with each other.
        side: the side that is compared.
        values: values by key of the column.
    """

    case: str = ""
    side: str
    values: Mapping[str, Values]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """Line of the short table: a figure of foundry and the figure to compare it with."""

    what: str
    foundry: str
    beside: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """Measurements of a benchmark and how they were taken.

    Attributes:
        name: name of the record's file without `.json`, by default that of the script.
        command: command line, relative to the repository's root.
        date: ISO date.
        commit: abbreviated commit; ends in a plus if the code had uncommitted changes.
        conditions: further conditions, such as other busy processes.
        machine: processor, cores, memory in GiB, GPU.
        versions: versions of Python and packages.
        case: heading of the column of cases; empty without this column.
        side: heading of the column of sides.
        columns: columns in order.
        rows: rows in order.
        notes: paragraphs below the table.
        chart: key of the column drawn as bars; empty without a chart.
        headlines: lines for the short table.
    """

    name: str
    command: str
    date: str
    commit: str
    conditions: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    case: str = ""
    side: str = "side"
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    chart: str = ""
    headlines: Sequence[Headline] = ()

    def table(self) -> str:
        """Return the table in Markdown."""
        first = [self.case, self.side] if self.case else [self.side]
        headings = [*first, *(column.heading for column in self.columns)]
        lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        for row in self.rows:
            words = [row.case, row.side] if self.case else [row.side]
            words += [column.cell(row.values.get(column.key)) for column in self.columns]
            lines.append(f"| {' | '.join(words)} |")
        return "\n".join(lines)

    def origin(self) -> str:
        """Return command, date, commit and machine in a line or two."""
        machine = self.machine
        where = [f"{machine['cores']} cores of {machine['cpu']}", f"{machine['memory_gib']} GiB"]
        where += [machine["gpu"]] if machine.get("gpu") else []
        installed = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        text = f"`{self.command}`, {self.date}, commit {self.commit}; {', '.join(where)}; {installed}"
        return f"{text}; {self.conditions}" if self.conditions else text

    def to_json(self) -> str:
        """Return the JSON text of the record's file."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Return the record of a JSON text; the inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        kinds: dict[str, type[Any]] = {"columns": Column, "rows": Row, "headlines": Headline}
        for key, kind in kinds.items():
            fields[key] = [kind(**item) for item in fields[key]]
        return cls(**fields)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Build the parser of the arguments of all benchmarks: `--smoke`, `--out` and `--conditions`.

    Args:
        description: docstring of the script.
    """
    cli = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it works: its figures mean nothing")
    cli.add_argument("--out", type=Path, help="the record's file; default: benchmarks/results, with --smoke none")
    cli.add_argument("--conditions", help="state of the machine for the record, such as 'beside other busy processes'")
    return cli


def finish(options: argparse.Namespace, **fields: Any) -> Record:
    """Print the measurements and write their record.

    Args:
        options: result of a parser built by `parser`.
        fields: further fields of `Record`; they replace values that this function determines, such as `name`.
    """
    facts: dict[str, Any] = {
        "name": Path(sys.argv[0]).stem,
        "command": _command(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "conditions": ", ".join(filter(None, [f"load {os.getloadavg()[2]:.1f}", options.conditions])),
        "machine": describe_machine(),
        "versions": _versions(),
    }
    record = Record(**facts | fields)
    print(f"{record.origin()}\n\n{record.table()}")
    for note in record.notes:
        print(f"\n{note}")
    file = options.out or (None if options.smoke else RESULTS / f"{record.name}.json")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(record.to_json(), encoding="utf-8")
    return record


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory in GiB, and the GPU if there is one."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _command() -> str:
    """Return the command line, without the script's folder and without options that name folders or conditions."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for option in ("--out", "--conditions", "--bases", "--keep"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    threads = os.environ.get("OMP_NUM_THREADS")
    before = f"OMP_NUM_THREADS={threads} " if threads else ""
    return f"{before}python benchmarks/{shlex.join(words)}"


def _commit() -> str:
    """Return the commit of the checkout, with a plus if the measured code has uncommitted changes."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD").strip()
        changed = _git("status", "--porcelain", "--", "foundry", "conf", "benchmarks/*.py").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
