"""`foundry diff RUN AGAINST`: compare the settings, plans, metrics and results of two runs.

Exit code 0: all of these are the same; 1: they differ. Only the files in the run directories are read, so either run
may still be training, or belong to another user.
"""

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.config.command import Outcome, check_output, command, folder_option, print_path, quoted, run_option
from foundry.config.record.frozen import read_recorded
from foundry.config.record.resume_compat import Difference, differences
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation, as_text, contrast
from foundry.core.exit_codes import ExitCode
from foundry.run_dir.names import CONFIG, METRICS, PLAN, RESULT, STATUS
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import flat, read_optional
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
"""Metrics of a logged step that differ between identical runs."""
_FROM_SETTINGS = ("lr", "weight_decay", "epoch", "global_batch_size", "samples", "tokens")
"""Metrics of a logged step that follow from the settings alone."""
_IGNORED = frozenset({*_SPEED, *_FROM_SETTINGS})
_DUPLICATES = ("config_hash",)
"""Keys of result.json that duplicate the settings."""
_MOST_PANELS, _FEW_POINTS = 6, 30


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Options of the command."""

    run: str = setting("???", "run directory")
    against: str = setting("???", "run directory to compare it with")
    picture: str | None = setting(None, "PNG file for the learning curves of both runs; null: none")


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory.

    Attributes:
        folder: the directory.
        settings: resolved configuration.
        plan: content of plan.json, nested names joined by dots.
        steps: hash of the metrics of each logged step, by step; a long run's metrics would need gigabytes of memory.
        evaluations: metrics of each evaluation, by step and then by name.
        result: content of result.json, nested names joined by dots; only `status` if the run has not finished.
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
            key: option of the directory, for messages.

        Raises:
            ConfigError: the folder is not a run directory, or a file in it is damaged.
        """
        settings = read_recorded(folder)
        if settings is None:
            raise ConfigError(
                Violation(key, f"is {as_text(folder)}, which is not a run directory: it has no readable {CONFIG}")
            )
        try:
            steps, evaluations = _read_metrics(folder)
            result = read_optional(folder / RESULT) or {
                "status": read_optional(folder / STATUS).get("state", "not started")
            }
            plan = read_optional(folder / PLAN)
        except (OSError, ValueError) as error:
            raise ConfigError(Violation(key, f"is {as_text(folder)}: {one_line(str(error))}")) from None
        return cls(folder, settings, dict(flat(plan)), steps, evaluations, dict(flat(result)))

    def logged(self, step: int) -> Mapping[str, Any]:
        """Return the metrics of a logged step by name, read from metrics.jsonl again."""
        records = [record for record in read_step(self.folder, step) if not is_evaluation(record)]
        return records[-1] if records else {}


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs.

    Attributes:
        run: the first run.
        against: the second run.
    """

    run: RunRecord
    against: RunRecord

    @property
    def settings(self) -> list[Difference]:
        """Settings that differ; `old` is the value of the first run."""
        return list(differences(self.run.settings, self.against.settings))

    @property
    def plan(self) -> list[tuple[str, Any, Any]]:
        """Name and both values of each entry of the plan that differs."""
        return list(_different_values(self.run.plan, self.against.plan))

    @property
    def results(self) -> list[tuple[str, Any, Any]]:
        """Name and both values of each result, equal or not."""
        run, against = self.run.result, self.against.result
        names = [name for name in {**run, **against} if name not in _DUPLICATES]
        return [(name, run.get(name), against.get(name)) for name in names]

    @property
    def common_steps(self) -> list[int]:
        """Steps logged by both runs, ascending."""
        return sorted(self.run.steps.keys() & self.against.steps.keys())

    @cached_property
    def first_difference(self) -> tuple[int, str, Any, Any] | None:
        """Step, metric and both values of the first difference in a step that both runs have; None without one."""
        run, against = self.run, self.against
        logged = (step for step in self.common_steps if run.steps[step] != against.steps[step])
        evaluated = sorted(run.evaluations.keys() & against.evaluations.keys())
        candidates = (
            _first_different_step((step, run.logged(step), against.logged(step)) for step in logged),
            _first_different_step((step, run.evaluations[step], against.evaluations[step]) for step in evaluated),
        )
        return min(filter(None, candidates), key=lambda entry: entry[0], default=None)

    @property
    def is_same(self) -> bool:
        """True if settings, plans, results and the metrics of common steps are equal."""
        same = all(_equal(run, against) for _, run, against in self.results)
        return same and not self.settings and not self.plan and self.first_difference is None

    def facts(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        first = self.first_difference
        return {
            "same": self.is_same,
            "settings": [{"key": change.key, "run": change.old, "against": change.new} for change in self.settings],
            "plan": [_pair(*entry) for entry in self.plan],
            "common_steps": len(self.common_steps),
            "first_difference": None if first is None else {"step": first[0], **_pair(*first[1:])},
            "results": [_pair(*entry) for entry in self.results],
        }

    def lines(self) -> Iterator[str]:
        """Yield the comparison as text, line by line."""
        yield from _table(
            "settings", [(change.key, change.old, change.new) for change in self.settings], "the same settings"
        )
        yield from _table("plan", self.plan, "the same plan")
        yield self._curves_line()
        yield ""
        yield from _table("result", self.results, "no results", with_difference=True)

    def _curves_line(self) -> str:
        """Return the line about the first difference between the curves."""
        steps, first = self.common_steps, self.first_difference
        if not steps:
            return "curves      no step that both runs have logged"
        if first is None:
            return f"curves      the same in all {len(steps)} steps that both runs have logged, up to step {steps[-1]}"
        step, name, run, against = first
        equal_steps = [number for number in steps if number < step]
        prefix = f"the same up to step {equal_steps[-1]}, " if equal_steps else ""
        values = " and ".join(contrast(run, against, _text))
        return f"curves      {prefix}different at step {step}: {one_line(name)} {values}"


def compare(run: Path, against: Path) -> Comparison:
    """Read and compare two run directories.

    Raises:
        ConfigError: a folder is not a run directory, or a file in it is damaged.
    """
    return Comparison(RunRecord.read(run, "run"), RunRecord.read(against, "against"))


def curves_figure(comparison: Comparison) -> "Figure":
    """Plot the training loss and the evaluation metrics that both runs have, one panel each, at most `_MOST_PANELS`."""
    runs = (comparison.run, comparison.against)
    losses = [{step: {"loss": value} for step, value in _read_losses(run)} for run in runs]
    curves: list[tuple[str, list[Mapping[int, Mapping[str, Any]]]]] = [("loss", [*losses])]
    metric_names = [{name for record in run.evaluations.values() for name in record} for run in runs]
    names = sorted(
        (metric_names[0] & metric_names[1]) - {"step", "samples"}, key=lambda name: (name != "val_loss", name)
    )
    curves += [(name, [run.evaluations for run in runs]) for name in names]
    plotted = curves[:_MOST_PANELS]
    figure, axes_list = panels(len(plotted))
    for axes, (metric, records_of_runs) in zip(axes_list, plotted, strict=True):
        axes.set_title(metric, loc="left", fontsize="medium", parse_math=False)
        count_steps(axes)
        for name, records, colour, style in zip(
            ("run", "against"), records_of_runs, (BLUE, ORANGE), ("-", "--"), strict=True
        ):
            values = {step: _number(record.get(metric)) for step, record in sorted(records.items())}
            points = {step: value for step, value in values.items() if value is not None}
            marker = "o" if len(points) <= _FEW_POINTS else ""
            curve = axes.plot(list(points), list(points.values()), style, color=colour, label=name)
            curve[0].set(linewidth=1.6, marker=marker, markersize=4)
    folders = one_line(f"run {comparison.run.folder}, against {comparison.against.folder}")
    head(figure, "Two runs", folders, handles=axes_list[0].get_legend_handles_labels()[0])
    return figure


def _read_metrics(folder: Path) -> tuple[dict[int, int], dict[int, Mapping[str, Any]]]:
    """Return `RunRecord.steps` and `RunRecord.evaluations`; if a step was repeated, the later record counts."""
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
    """Return a hash that is equal for records without a difference, as defined by `_different_values`."""
    values = {name: _hashable(value) for name, value in record.items() if name not in _IGNORED and value is not None}
    return hash(frozenset(values.items()))


def _hashable(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value if value == value else "NaN"
    return repr(value)


def _first_different_step(
    pairs: Iterable[tuple[int, Mapping[str, Any], Mapping[str, Any]]],
) -> tuple[int, str, Any, Any] | None:
    """Return the first step whose records differ, with metric and values; the loss is preferred over other metrics."""
    for step, run, against in pairs:
        if entries := list(_different_values(run, against, ignored=_IGNORED)):
            return (step, *next((entry for entry in entries if entry[0] in ("loss", "val_loss")), entries[0]))
    return None


def _different_values(
    run: Mapping[str, Any], against: Mapping[str, Any], ignored: Container[str] = ()
) -> Iterator[tuple[str, Any, Any]]:
    for name in {**run, **against}:
        if name not in ignored and not _equal(run.get(name), against.get(name)):
            yield name, run.get(name), against.get(name)


def _pair(name: str, run: Any, against: Any) -> dict[str, Any]:
    return {"key": name, "run": run, "against": against}


def _equal(first: Any, second: Any) -> bool:
    """Return True if two values are equal; NaN equals NaN."""
    return bool(first == second) or (first != first and second != second)  # only NaN is unequal to itself


def _number(value: Any) -> float | None:
    """Return a value as a float, to subtract or plot it; None if it is not a number."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _text(value: Any) -> str:
    """Return a value as text, with enough digits to distinguish two losses."""
    return "-" if value is None else f"{value:.9g}" if isinstance(value, float) else as_text(value)


def _table(
    title: str, rows: Sequence[tuple[str, Any, Any]], sentence: str, *, with_difference: bool = False
) -> Iterator[str]:
    """Yield rows as aligned columns below the title; `sentence` if there are no rows."""
    if not rows:
        yield f"{title:<12}{sentence}"
        yield ""
        return
    cells = [[one_line(name), *contrast(run, against, _text)] for name, run, against in rows]
    for row, (_, run, against) in zip(cells, rows, strict=True):
        first, second = _number(run), _number(against)
        if with_difference and first is not None and second is not None and first != second:
            row.append(f"{second - first:+.4g}")
    head = [title, "run", "against", *(["difference"] if any(len(row) > 3 for row in cells) else [])]
    widths = [max(len(row[column]) for row in [head, *cells] if len(row) > column) for column in range(len(head))]
    for row in (head, *cells):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
    yield ""


def print_differences(options: DiffOptions) -> Outcome:
    """Compare two runs and print the differences."""
    picture = None if options.picture is None else folder_option("picture", options.picture)
    if picture is not None:
        check_output("picture", picture)
        if picture.suffix != ".png":
            raise ConfigError(Violation("picture", f"is {as_text(picture)} but must be a .png file"))
    comparison = compare(run_option("run", options.run), run_option("against", options.against))
    for line in comparison.lines():
        sys.stdout.write(f"{line}\n")
    if picture is not None:
        save_figure(curves_figure(comparison), picture)
        print_path(picture, f"{'picture':<12}")
    return Outcome(comparison.facts(), ExitCode.SUCCESS if comparison.is_same else ExitCode.FAILED)


def _add_option_names(words: Sequence[str]) -> list[str]:
    """Return the arguments with `run=` and `against=` added to the first two bare folders."""
    names = iter(("run", "against"))
    is_folder = [Path(word).is_dir() or not (word.startswith("-") or "=" in word) for word in words]
    return [
        f"{name}={quoted(word)}" if folder and (name := next(names, None)) else word
        for word, folder in zip(words, is_folder, strict=True)
    ]


def main() -> None:
    """Entry point of the command."""
    sys.argv[1:] = _add_option_names(sys.argv[1:])
    command(DiffOptions, print_differences, name="foundry.diff", doc=__doc__.split(": ", 1)[1].strip())
