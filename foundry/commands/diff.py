"""`foundry diff RUN AGAINST`: two runs side by side: settings, plan, how far they are the same, and results.

Exit code 0: they are the same in all of that; 1: they are not. Only what their directories say is read, so either run
may still be training, or be somebody else's.
"""

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.config.command import Outcome, check_output, command, folder_option, print_path, quoted
from foundry.config.record.frozen import read_recorded
from foundry.config.record.resume_compat import Difference, differences
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation, contrast, shown
from foundry.run_dir.names import CONFIG, METRICS, PLAN, RESULT, STATUS
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import read_object
from foundry.tracking.metrics_file import is_evaluation, iterate_metrics, read_curve, read_step
from foundry.tracking.plot_style import BLUE, ORANGE, count_steps, head, panels, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPEED = (
    "tokens_per_second",
    "samples_per_second",
    "step_seconds",
    "tflops",
    "mfu",
    "peak_memory_bytes",
    "reserved_memory_bytes",
    "allocator_retries",
)
"""Of a logged step: they differ between two runs that are the same."""
_CHOSEN = ("lr", "weight_decay", "epoch", "global_batch_size", "samples", "tokens")
"""Of a logged step: they follow from the settings, and say nothing of what came of them."""
_IGNORED = frozenset({*_SPEED, *_CHOSEN})
_SAID = ("config_hash",)
"""Of result.json: the settings say it already."""
_MOST_PANELS, _FEW_POINTS = 6, 30


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """The command's options."""

    run: str = setting("???", "run directory")
    against: str = setting("???", "another one")
    picture: str | None = setting(None, "PNG file to draw the learning curves of both into; null: none")


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says of its run.

    Attributes:
        folder: the directory.
        settings: the resolved configuration.
        plan: what followed from it, nested names joined by dots.
        steps: a hash of the metrics of each logged step, by step: all records of a long run would need gigabytes.
        evaluations: name and value of each metric of held-out data, by step.
        result: what came of it, nested names joined by dots; of a run that has not finished its state.
    """

    folder: Path
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]
    steps: Mapping[int, int]
    evaluations: Mapping[int, Mapping[str, Any]]
    result: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, key: str) -> "RunRecord":
        """Read a run directory.

        Args:
            folder: the directory.
            key: of the option that names it.

        Raises:
            ConfigError: it is none, or a file in it is damaged.
        """
        settings = read_recorded(folder)
        if settings is None:
            raise ConfigError(Violation(key, f"is {shown(folder)}, which has no readable {CONFIG}: it is no run"))
        try:
            steps, evaluations = _read_metrics(folder)
            result = _read(folder / RESULT) or {"status": _read(folder / STATUS).get("state", "not started")}
            plan = _read(folder / PLAN)
        except (OSError, ValueError) as error:
            raise ConfigError(Violation(key, f"is {shown(folder)}: {one_line(str(error))}")) from None
        return cls(folder, settings, dict(_flat(plan)), steps, evaluations, dict(_flat(result)))

    def logged(self, step: int) -> Mapping[str, Any]:
        """Return the metrics of a logged step by name; the file is read again."""
        records = [record for record in read_step(self.folder, step) if not is_evaluation(record)]
        return records[-1] if records else {}


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other.

    Attributes:
        run: the first.
        against: the second.
    """

    run: RunRecord
    against: RunRecord

    @property
    def settings(self) -> list[Difference]:
        """Settings that are not the same; `was` is the first run's."""
        return list(differences(self.run.settings, self.against.settings))

    @property
    def plan(self) -> list[tuple[str, Any, Any]]:
        """Name and values of what does not follow from both configurations alike."""
        return list(_differing(self.run.plan, self.against.plan))

    @property
    def results(self) -> list[tuple[str, Any, Any]]:
        """Name and values of all that came of them, the same or not."""
        one, other = self.run.result, self.against.result
        names = [name for name in {**one, **other} if name not in _SAID]
        return [(name, one.get(name), other.get(name)) for name in names]

    @property
    def common_steps(self) -> list[int]:
        """Steps that both have logged, ascending."""
        return sorted(self.run.steps.keys() & self.against.steps.keys())

    @cached_property
    def first_difference(self) -> tuple[int, str, Any, Any] | None:
        """The first step both have logged, or evaluated at, with other numbers: step, metric and values; None: none."""
        run, against = self.run, self.against
        logged = (step for step in self.common_steps if run.steps[step] != against.steps[step])
        evaluated = sorted(run.evaluations.keys() & against.evaluations.keys())
        found = (
            _first_differing((step, run.logged(step), against.logged(step)) for step in logged),
            _first_differing((step, run.evaluations[step], against.evaluations[step]) for step in evaluated),
        )
        return min(filter(None, found), key=lambda entry: entry[0], default=None)

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        same = all(_equal(one, other) for _, one, other in self.results)
        return same and not self.settings and not self.plan and self.first_difference is None

    def facts(self) -> dict[str, Any]:
        """Return the comparison as values of JSON."""
        first = self.first_difference
        return {
            "same": self.is_same,
            "settings": [{"key": one.key, "run": one.was, "against": one.now} for one in self.settings],
            "plan": [_pair(*entry) for entry in self.plan],
            "common_steps": len(self.common_steps),
            "first_difference": None if first is None else {"step": first[0], **_pair(*first[1:])},
            "results": [_pair(*entry) for entry in self.results],
        }

    def lines(self) -> Iterator[str]:
        """What to tell a person, line by line."""
        yield from _table("settings", [(one.key, one.was, one.now) for one in self.settings], "the same settings")
        yield from _table("plan", self.plan, "the same plan")
        yield self._how_far()
        yield ""
        yield from _table("result", self.results, "no results", with_difference=True)

    def _how_far(self) -> str:
        """Up to which step the curves are the same."""
        steps, first = self.common_steps, self.first_difference
        if not steps:
            return "curves      no step that both have logged"
        if first is None:
            return f"curves      the same in all {len(steps)} logged steps that both have, to step {steps[-1]}"
        step, name, one, other = first
        before = [number for number in steps if number < step]
        how_far = f"the same to step {before[-1]}, " if before else ""
        values = " and ".join(contrast(one, other, _text))
        return f"curves      {how_far}different at step {step}: {one_line(name)} {values}"


def compare(run: Path, against: Path) -> Comparison:
    """Read two run directories.

    Raises:
        ConfigError: one is no run directory, or a file in it is damaged.
    """
    return Comparison(RunRecord.read(run, "run"), RunRecord.read(against, "against"))


def curves_figure(compared: Comparison) -> "Figure":
    """A panel for the training loss and for each metric of evaluations that both runs have."""
    runs = (compared.run, compared.against)
    losses = [{step: {"loss": value} for step, value in _read_losses(run)} for run in runs]
    curves: list[tuple[str, list[Mapping[int, Mapping[str, Any]]]]] = [("loss", [*losses])]
    both = [{name for record in run.evaluations.values() for name in record} for run in runs]
    names = sorted((both[0] & both[1]) - {"step", "samples"}, key=lambda name: (name != "val_loss", name))
    curves += [(name, [run.evaluations for run in runs]) for name in names]
    shown = curves[:_MOST_PANELS]
    figure, found = panels(len(shown))
    for axes, (metric, recorded) in zip(found, shown, strict=True):
        axes.set_title(metric, loc="left", fontsize="medium", parse_math=False)
        count_steps(axes)
        for name, records, colour, style in zip(("run", "against"), recorded, (BLUE, ORANGE), ("-", "--"), strict=True):
            values = {step: _number(record.get(metric)) for step, record in sorted(records.items())}
            points = {step: value for step, value in values.items() if value is not None}
            marker = "o" if len(points) <= _FEW_POINTS else ""
            curve = axes.plot(list(points), list(points.values()), style, color=colour, label=name)
            curve[0].set(linewidth=1.6, marker=marker, markersize=4)
    folders = one_line(f"run {compared.run.folder}, against {compared.against.folder}")
    head(figure, "Two runs", folders, handles=found[0].get_legend_handles_labels()[0])
    return figure


def _read_metrics(folder: Path) -> tuple[dict[int, int], dict[int, Mapping[str, Any]]]:
    """Return `RunRecord.steps` and `RunRecord.evaluations`; of a step that was taken again, the later record counts."""
    steps, evaluations = dict[int, int](), dict[int, Mapping[str, Any]]()
    for record in iterate_metrics(folder) if (folder / METRICS).is_file() else ():
        if is_evaluation(record):
            evaluations[record["step"]] = record
        else:
            steps[record["step"]] = _hash(record)
    return steps, evaluations


def _read_losses(run: RunRecord) -> list[tuple[int, Any]]:
    return read_curve(run.folder, "loss") if run.steps else []


def _hash(record: Mapping[str, Any]) -> int:
    """Return the same number for records that do not differ, as `_differing` has it."""
    compared = {name: _hashable(value) for name, value in record.items() if name not in _IGNORED and value is not None}
    return hash(frozenset(compared.items()))


def _hashable(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value if value == value else "NaN"
    return repr(value)


def _first_differing(
    pairs: Iterable[tuple[int, Mapping[str, Any], Mapping[str, Any]]],
) -> tuple[int, str, Any, Any] | None:
    """Return the first step whose records differ, the metric that does, and its values; of several metrics the loss."""
    for step, one, other in pairs:
        if differing := list(_differing(one, other, ignored=_IGNORED)):
            return (step, *next((entry for entry in differing if entry[0] in ("loss", "val_loss")), differing[0]))
    return None


def _read(file: Path) -> dict[str, Any]:
    """A file of a run directory; nothing where there is none yet."""
    try:
        return read_object(file)
    except FileNotFoundError:
        return {}


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves, nested names joined by dots."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _differing(
    one: Mapping[str, Any], other: Mapping[str, Any], ignored: Container[str] = ()
) -> Iterator[tuple[str, Any, Any]]:
    for name in {**one, **other}:
        if name not in ignored and not _equal(one.get(name), other.get(name)):
            yield name, one.get(name), other.get(name)


def _pair(name: str, one: Any, other: Any) -> dict[str, Any]:
    return {"key": name, "run": one, "against": other}


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same; NaN is like itself."""
    return bool(one == other) or (one != one and other != other)  # what is not itself is NaN


def _number(value: Any) -> float | None:
    """What can be subtracted and drawn; None for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _text(value: Any) -> str:
    """With as many digits as tell two losses apart."""
    return "-" if value is None else f"{value:.9g}" if isinstance(value, float) else shown(value)


def _table(
    title: str, rows: Sequence[tuple[str, Any, Any]], none: str, *, with_difference: bool = False
) -> Iterator[str]:
    """Rows in columns, below the title; a sentence where there are none."""
    if not rows:
        yield f"{title:<12}{none}"
        yield ""
        return
    cells = [[one_line(name), *contrast(one, other, _text)] for name, one, other in rows]
    for row, (_, one, other) in zip(cells, rows, strict=True):
        first, second = _number(one), _number(other)
        if with_difference and first is not None and second is not None and first != second:
            row.append(f"{second - first:+.4g}")
    head = [title, "run", "against", *(["difference"] if any(len(row) > 3 for row in cells) else [])]
    widths = [max(len(row[column]) for row in [head, *cells] if len(row) > column) for column in range(len(head))]
    for row in (head, *cells):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
    yield ""


def print_differences(options: DiffOptions) -> Outcome:
    """Compare and print."""
    picture = None if options.picture is None else folder_option("picture", options.picture)
    if picture is not None:
        check_output("picture", picture)
        if picture.suffix != ".png":
            raise ConfigError(Violation("picture", f"is {shown(picture)}, which is no .png file; choose another"))
    compared = compare(folder_option("run", options.run), folder_option("against", options.against))
    for line in compared.lines():
        sys.stdout.write(f"{line}\n")
    if picture is not None:
        save_figure(curves_figure(compared), picture)
        print_path(picture, f"{'picture':<12}")
    return Outcome(compared.facts(), 0 if compared.is_same else 1)


def _named(words: Sequence[str]) -> list[str]:
    """The arguments, of which the first two may be the folders alone."""
    names = iter(("run", "against"))
    is_folder = [Path(word).is_dir() or not (word.startswith("-") or "=" in word) for word in words]
    return [
        f"{name}={quoted(word)}" if folder and (name := next(names, None)) else word
        for word, folder in zip(words, is_folder, strict=True)
    ]


def main() -> None:
    """Compare from the command line."""
    sys.argv[1:] = _named(sys.argv[1:])
    command(DiffOptions, print_differences, name="foundry.diff", doc=__doc__.split(": ", 1)[1].strip())
