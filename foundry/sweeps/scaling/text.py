"""A scaling law as lines of text."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from foundry.core.errors import counted
from foundry.run_dir.redact import one_line
from foundry.sweeps.scaling.analysis import FORMS, Analysis, Optimum, Prediction
from foundry.sweeps.scaling.runs import Parameters, Run
from foundry.tracking.humanize import count

_NONE = "-"
_COUNTED = {Parameters.non_embedding: "without embeddings and head", Parameters.total: "in total"}

Interval = tuple[float, float] | None
Formatter = Callable[[float], str]


def analysis_lines(analysis: Analysis) -> Iterator[str]:
    """Yield an analysis as lines: jobs, law, residuals, predictions, compute-optimal sizes and notes."""
    selection, percent = analysis.selection, f"{100 * analysis.confidence:.4g}% interval"
    parts = [f"{len(selection.fitted)} fitted"]
    parts += [f"{len(selection.held_out)} held out"] if selection.held_out else []
    parts += [f"{len(selection.excluded)} left out"] if selection.excluded else []
    total = len(selection.fitted) + len(selection.held_out) + len(selection.excluded)
    yield f"{counted(total, 'job')}: {', '.join(parts)}"
    for job, reason in selection.excluded:
        yield f"job {job.index} left out: {one_line(reason)}"
    yield from ("", f"{FORMS[analysis.variables]}, N: parameters {_COUNTED[analysis.counted]}, D: tokens trained")
    yield from _block(["constant", "value", percent], _constant_rows(analysis))
    fitted = [[*_run_cells(run), _loss(loss), f"{np.expm1(residual):+.2%}"] for run, loss, residual in analysis.rows()]
    yield from _block(["job", "N", "D", "6ND", analysis.metric, "fitted", "residual"], fitted)
    yield f"root mean square of the residuals: {np.sqrt(np.mean(analysis.result.residuals**2)):.2%}"
    held_out = [
        [*_run_cells(item.run), *_predicted(item), f"{item.error:+.2%}"]
        for item in analysis.predictions
        if item.run is not None
    ]
    names = ["held-out job", "N", "D", "6ND", analysis.metric, "times largest", "predicted", percent, "error"]
    yield from _block(names, held_out)
    sizes = [
        [count(item.parameters), count(item.tokens), *_predicted(item)]
        for item in analysis.predictions
        if item.run is None
    ]
    yield from _block(["N", "D", "times largest", "predicted", percent], sizes)
    optimal = ["6ND", "optimal N", percent, "optimal D", percent, "loss", percent]
    yield from _block(optimal, [_optimum_cells(item) for item in analysis.optima])
    if notes := analysis.notes:
        yield from ("", *(f"note: {one_line(note)}" for note in notes))


def _constant_rows(analysis: Analysis) -> Iterator[list[str]]:
    result = analysis.result
    batch = {} if result.resampled is None else result.resampled.constants()
    for name, value in result.law.constants().items():
        interval = result.interval(batch[name], analysis.confidence) if batch else None
        yield [name, f"{float(value):.4g}", _interval(interval, "{:.4g}".format)]


def _run_cells(run: Run) -> list[str]:
    return [str(run.job.index), count(run.parameters), count(run.tokens), f"{run.flops:.3g}", _loss(run.loss)]


def _predicted(item: Prediction) -> list[str]:
    """Return the cells of a prediction: largest extrapolation, loss and interval."""
    variable, times = max(item.extrapolation.items(), key=lambda entry: entry[1])
    return [f"{times:.3g} ({variable})", _loss(item.loss), _interval(item.interval, _loss)]


def _optimum_cells(item: Optimum) -> list[str]:
    values = {"N": (item.parameters, count), "D": (item.tokens, count), "loss": (item.loss, _loss)}
    cells = [f"{item.flops:.3g}"]
    for name, (value, formatter) in values.items():
        cells += [formatter(value) if np.isfinite(value) else _NONE, _interval(item.intervals[name], formatter)]
    return cells


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _interval(interval: Interval, formatter: Formatter) -> str:
    return _NONE if interval is None else " to ".join(map(formatter, interval))


def _block(names: Sequence[str], rows: Iterator[list[str]] | Sequence[list[str]]) -> Iterator[str]:
    """Yield an empty line and a table with right-aligned columns; nothing without rows."""
    table = [list(names), *rows]
    if len(table) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    yield ""
    for row in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
