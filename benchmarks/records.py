"""What a benchmark leaves: `benchmarks/results/<name>.json`, of which the documentation's tables and charts are made.

A record says where, when, by which command and at which commit it was measured, what its columns mean, and has every
round's value: medians and spreads are taken when it is shown.
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
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "trl")

Values: TypeAlias = "Sequence[float] | str | None"
"""Of a cell: a value a round, or a text; None where there is nothing to say."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Of a table.

    Attributes:
        key: of `Row.values`.
        heading: with the unit.
        format: of a number, as Python's `format` takes it.
        spread: show the smallest and the largest value beside the median.
    """

    key: str
    heading: str
    format: str = ",.0f"
    spread: bool = False

    def cell(self, values: Values) -> str:
        """What stands in a row of the table."""
        if values is None or isinstance(values, str):
            return values or ""
        middle, least, most = (format(each, self.format) for each in (statistics.median(values), *_ends(values)))
        return f"{middle} ({least} to {most})" if self.spread and least != most else middle


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side of a comparison under one condition.

    Attributes:
        case: the condition; rows of a case are compared with each other.
        side: what is compared.
        values: by the key of a column.
    """

    case: str = ""
    side: str
    values: Mapping[str, Values]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A line of the short table: a figure of foundry's and what it is to be seen beside."""

    what: str
    foundry: str
    beside: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was measured, and how.

    Attributes:
        name: of the script.
        command: as it was typed, in the repository's root.
        date: ISO.
        commit: abbreviated; ends in a plus where the code had been changed since.
        conditions: what else could matter, such as other busy processes.
        machine: processor, cores, memory in GiB, GPU.
        versions: of Python and packages.
        case: heading of the column of cases; empty where there are none.
        side: heading of the column of sides.
        columns: in order.
        rows: in order.
        notes: paragraphs below the table.
        chart: key of the column that is drawn as bars; empty where none is.
        headlines: for the short table.
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
        """In Markdown."""
        first = [self.case, self.side] if self.case else [self.side]
        headings = [*first, *(column.heading for column in self.columns)]
        lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        for row in self.rows:
            words = [row.case, row.side] if self.case else [row.side]
            words += [column.cell(row.values.get(column.key)) for column in self.columns]
            lines.append(f"| {' | '.join(words)} |")
        return "\n".join(lines)

    def origin(self) -> str:
        """Command, date, commit and machine, in a line or two."""
        machine = self.machine
        where = [f"{machine['cores']} cores of {machine['cpu']}", f"{machine['memory_gib']} GiB"]
        where += [machine["gpu"]] if machine.get("gpu") else []
        installed = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        said = f"`{self.command}`, {self.date}, commit {self.commit}; {', '.join(where)}; {installed}"
        return f"{said}; {self.conditions}" if self.conditions else said

    def to_json(self) -> str:
        """As its file holds it."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """The inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        kinds: dict[str, type[Any]] = {"columns": Column, "rows": Row, "headlines": Headline}
        for key, kind in kinds.items():
            fields[key] = [kind(**one) for one in fields[key]]
        return cls(**fields)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Build the parser of the arguments that all benchmarks take: `--smoke`, `--out` and `--conditions`.

    Args:
        description: the script's docstring.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it works: its figures mean nothing")
    made.add_argument("--out", type=Path, help="the record's file; default: benchmarks/results, with --smoke none")
    made.add_argument("--conditions", help="state of the machine for the record, such as 'beside other busy processes'")
    return made


def finish(options: argparse.Namespace, **fields: Any) -> Record:
    """Print what was measured and write its record.

    Args:
        options: of a parser made by `parser`.
        fields: of `Record` but those that are known here; `name` is the script's where it is not given.
    """
    known: dict[str, Any] = {
        "name": Path(sys.argv[0]).stem,
        "command": _command(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "conditions": ", ".join(filter(None, [f"load {os.getloadavg()[2]:.1f}", options.conditions])),
        "machine": describe_machine(),
        "versions": _versions(),
    }
    record = Record(**known | fields)
    print(f"{record.origin()}\n\n{record.table()}")
    for note in record.notes:
        print(f"\n{note}")
    file = options.out or (None if options.smoke else RESULTS / f"{record.name}.json")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(record.to_json(), encoding="utf-8")
    return record


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB, and the GPU where there is one."""
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
    """The command line, without folders and the options that describe the record."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for option in ("--out", "--conditions", "--bases"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    threads = os.environ.get("OMP_NUM_THREADS")
    before = f"OMP_NUM_THREADS={threads} " if threads else ""
    return f"{before}python benchmarks/{shlex.join(words)}"


def _commit() -> str:
    """Of the checkout; a plus where what was measured had been changed."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD").strip()
        changed = _git("status", "--porcelain", "--", "foundry", "conf", "benchmarks/*.py").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
