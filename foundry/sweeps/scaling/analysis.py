"""A fitted scaling law with residuals, predictions and compute-optimal sizes."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundry.core.errors import ConfigError, Violation, counted
from foundry.sweeps.reading import JobReport
from foundry.sweeps.scaling.law import (
    DELTA,
    FLOPS_PER_PARAMETER_AND_TOKEN,
    NAMES,
    VARIABLES,
    DesignError,
    Fit,
    check_design,
    fit,
    varying,
)
from foundry.sweeps.scaling.runs import Parameters, Run, Selection
from foundry.tracking.humanize import count

FORMS = {
    ("N", "D"): "L(N, D) = E + A/N^alpha + B/D^beta",
    ("N",): "L(N) = E + A/N^alpha",
    ("D",): "L(D) = E + B/D^beta",
}
"""Formula of the law for each choice of variables."""
_FEW_RESIDUAL_DEGREES = 3
_SAME = 1.01
"""Largest ratio of two values of a constant variable that count as equal."""


@dataclass(frozen=True)
class Prediction:
    """Predicted loss of a run.

    Attributes:
        parameters: N.
        tokens: D.
        loss: predicted loss.
        interval: interval for the loss of a run; None if it could not be computed.
        run: held-out run of this size; None for a size that the user gave.
        extrapolation: for each variable of the law, its value over the largest one of the fitted runs.
    """

    parameters: float
    tokens: float
    loss: float
    interval: tuple[float, float] | None
    run: Run | None
    extrapolation: dict[str, float]

    @property
    def error(self) -> float | None:
        """Relative error, (predicted - measured) / measured; None without a measured loss."""
        return None if self.run is None else self.loss / self.run.loss - 1

    def facts(self) -> dict[str, Any]:
        """Return the predicted loss as stored in scaling.json."""
        return {"predicted": self.loss, "interval": self.interval, "times_largest": self.extrapolation}


@dataclass(frozen=True)
class Optimum:
    """Compute-optimal size for a budget.

    Attributes:
        flops: the budget C.
        parameters: N; NaN if an exponent of the law is not positive. The same holds for `tokens` and `loss`.
        tokens: D, so that 6 N D = C.
        loss: loss of the law there.
        intervals: interval of each of the three numbers, by name; None if it could not be computed.
    """

    flops: float
    parameters: float
    tokens: float
    loss: float
    intervals: dict[str, tuple[float, float] | None]

    def facts(self) -> dict[str, Any]:
        """Return the optimum as stored in scaling.json."""
        return {
            "flops": self.flops,
            "N": self.parameters,
            "D": self.tokens,
            "loss": self.loss,
            "intervals": self.intervals,
        }


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A law fitted to the runs of a sweep.

    Attributes:
        folder: directory of the sweep.
        metric: name of the loss.
        counted: parameters that count as N.
        selection: fitted, held-out and excluded jobs.
        names: keys whose values differ between the jobs of the sweep.
        result: the fit.
        confidence: confidence of the intervals.
        seed: seed of the resampling.
        predictions: predictions of held-out runs, then of the given sizes.
        optima: compute-optimal sizes.
    """

    folder: Path
    metric: str
    counted: Parameters
    selection: Selection
    names: tuple[str, ...]
    result: Fit
    confidence: float
    seed: int
    predictions: tuple[Prediction, ...]
    optima: tuple[Optimum, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables of the law."""
        return self.result.law.variables

    @property
    def notes(self) -> list[str]:
        """Remarks that limit the meaning of the law."""
        notes, runs = self.selection.notes(self.names), self.selection.fitted
        for index, variable in enumerate(VARIABLES):
            if variable not in self.variables:
                values = count(float(np.median([run.point[index] for run in runs])))
                other = f"{NAMES[variable][0]}/{variable}^{NAMES[variable][1]}"
                notes.append(f"all jobs have {variable} = {values}, so E contains the term {other}")
        spare = len(runs) - self.result.law.theta.size
        if spare < _FEW_RESIDUAL_DEGREES:
            notes.append(
                f"{counted(len(runs), 'job')} for {self.result.law.theta.size} parameters: the residuals say little "
                "about the error of a prediction; add jobs"
            )
        if self.result.resampled is None:
            notes.append("no intervals: too few of the resampled sets of runs determine the law; add jobs")
        constants = self.result.law.constants()
        for exponent in (NAMES[variable][1] for variable in self.variables):
            if constants[exponent] <= 0:
                notes.append(f"{exponent} is not positive: the loss does not fall with this variable in these runs")
        return notes

    def facts(self) -> dict[str, Any]:
        """Return the content of scaling.json."""
        return {
            "law": self._law_facts(),
            "fit": {
                "runs": len(self.selection.fitted),
                "parameters": self.result.law.theta.size,
                "huber_delta": DELTA,
                "objective": self.result.objective,
                "rms_residual": float(np.sqrt(np.mean(self.result.residuals**2))),
            },
            "bootstrap": {
                "resamples": 0 if self.result.resampled is None else len(self.result.noise),
                "confidence": self.confidence,
                "seed": self.seed,
            },
            "runs": [
                self._run_facts(run) | {"fitted": fitted, "residual": float(residual)}
                for run, fitted, residual in self.rows()
            ],
            "held_out": [
                self._run_facts(item.run) | item.facts() | {"error": item.error}
                for item in self.predictions
                if item.run is not None
            ],
            "predictions": [
                {"N": item.parameters, "D": item.tokens} | item.facts() for item in self.predictions if item.run is None
            ],
            "optima": [item.facts() for item in self.optima],
            "excluded": [
                {"job": job.index, "run_dir": self._dir(job), "reason": reason}
                for job, reason in self.selection.excluded
            ],
            "notes": self.notes,
        }

    def rows(self) -> Iterator[tuple[Run, float, float]]:
        """Yield each fitted run with its fitted loss and residual."""
        for run, residual in zip(self.selection.fitted, self.result.residuals, strict=True):
            yield run, float(run.loss / np.exp(residual)), float(residual)

    def _law_facts(self) -> dict[str, Any]:
        """Return formula, variables and constants of the law."""
        constants, resampled = self.result.law.constants(), self.result.resampled
        intervals: dict[str, tuple[float, float] | None] = dict.fromkeys(constants)
        if resampled is not None:
            samples = resampled.constants()
            intervals = {name: self.result.interval(samples[name], self.confidence) for name in constants}
        return {
            "form": FORMS[self.variables],
            "N": self.counted.value,
            "D": "tokens",
            "metric": self.metric,
            "flops": f"C = {FLOPS_PER_PARAMETER_AND_TOKEN} N D",
            "constants": {
                name: {"value": float(value), "interval": intervals[name]} for name, value in constants.items()
            },
        }

    def _dir(self, job: JobReport) -> str:
        return os.path.relpath(job.run_dir, self.folder)

    def _run_facts(self, run: Run) -> dict[str, Any]:
        return {
            "job": run.job.index,
            "run_dir": self._dir(run.job),
            "non_embedding_parameters": run.non_embedding_parameters,
            "total_parameters": run.total_parameters,
            "tokens": run.tokens,
            "flops": run.flops,
            "loss": run.loss,
        }


def analyze(
    selection: Selection,
    *,
    folder: Path,
    names: Sequence[str],
    metric: str,
    counted_as: Parameters,
    sizes: Sequence[dict[str, float]],
    budgets: Sequence[float],
    confidence: float,
    resamples: int,
    seed: int,
) -> Analysis:
    """Fit a law to the fitted runs of a selection, and predict.

    Args:
        selection: the runs.
        folder: directory of the sweep.
        names: keys whose values differ between the jobs of the sweep.
        metric: name of the loss.
        counted_as: parameters that count as N.
        sizes: sizes to predict, each with N, D or both.
        budgets: compute budgets in FLOPs.
        confidence: confidence of the intervals.
        resamples: number of resampled fits.
        seed: seed of the resampling.

    Raises:
        ConfigError: the runs do not determine the law, a size lacks a variable of the law, or a budget needs a law in
            both variables.
    """
    points = np.array([run.point for run in selection.fitted], dtype=np.float64).reshape(-1, len(VARIABLES))
    losses = np.array([run.loss for run in selection.fitted])
    variables = _find_variables(points, selection, folder)
    _check_predictions(selection, sizes, budgets, points, variables)
    result = fit(points, losses, variables, resamples=resamples, seed=seed)
    predict = _Predictor(result, points, confidence)
    return Analysis(
        folder=folder,
        metric=metric,
        counted=counted_as,
        selection=selection,
        names=tuple(names),
        result=result,
        confidence=confidence,
        seed=seed,
        predictions=(
            *(predict(dict(zip(VARIABLES, run.point, strict=True)), run) for run in selection.held_out),
            *(predict(size) for size in sizes),
        ),
        optima=tuple(_optimum(result, flops, confidence) for flops in budgets),
    )


def _find_variables(points: Any, selection: Selection, folder: Path) -> tuple[str, ...]:
    """Return the variables of a law that the fitted runs determine.

    Raises:
        ConfigError: the runs determine no law.
    """
    variables = varying(points)
    try:
        check_design(points, variables)
    except DesignError as error:
        reasons = [f"job {job.index}: {reason}" for job, reason in selection.excluded]
        left_out = f" ({counted(len(reasons), 'job')} left out; {reasons[0]})" if reasons else ""
        raise ConfigError(Violation("dir", f"is {folder}, whose usable jobs {error}{left_out}")) from None
    return variables


def _check_predictions(
    selection: Selection,
    sizes: Sequence[dict[str, float]],
    budgets: Sequence[float],
    points: Any,
    variables: tuple[str, ...],
) -> None:
    """Check that a law in these variables can predict the held-out runs, the sizes and the budgets.

    Raises:
        ConfigError: a size lacks a variable, a constant variable has another value, or a budget needs both variables.
    """
    if budgets and variables != VARIABLES:
        message = f"needs a law in N and D, but only {variables[0]} differs between the jobs; leave budgets out"
        raise ConfigError(Violation("budgets", message))
    for run in selection.held_out:
        _check_constants("hold_out", dict(zip(VARIABLES, run.point, strict=True)), points, variables)
    for size in sizes:
        if missing := [variable for variable in variables if variable not in size]:
            given = " ".join(f"{name}={count(value)}" for name, value in size.items())
            message = f"is {given}, which has no {missing[0]}; write predict='N=30M D=600M'"
            raise ConfigError(Violation("predict", message))
        _check_constants("predict", size, points, variables)


def _check_constants(key: str, size: dict[str, float], points: Any, variables: Sequence[str]) -> None:
    """Refuse another value of a variable that is constant in the fitted runs."""
    for index, variable in enumerate(VARIABLES):
        if variable in variables or variable not in size:
            continue
        constant = float(np.median(points[:, index]))
        if max(constant / size[variable], size[variable] / constant) > _SAME:
            message = f"has {variable}={count(size[variable])}, but all fitted jobs have {variable}={count(constant)}"
            raise ConfigError(Violation(key, f"{message}; add jobs with other {variable}"))


@dataclass(frozen=True)
class _Predictor:
    result: Fit
    points: Any
    confidence: float

    def __call__(self, size: dict[str, float], run: Run | None = None) -> Prediction:
        """Return the prediction for a size."""
        variables = self.result.law.variables
        loss, interval = self.result.predict([size[variable] for variable in variables], self.confidence)
        largest = dict(zip(VARIABLES, self.points.max(axis=0), strict=True))
        beyond = {variable: float(size[variable] / largest[variable]) for variable in variables}
        constants = dict(zip(VARIABLES, np.median(self.points, axis=0), strict=True))
        n, d = (float(size.get(variable, constants[variable])) for variable in VARIABLES)
        return Prediction(n, d, loss, interval, run, beyond)


def _optimum(result: Fit, flops: float, confidence: float) -> Optimum:
    numbers = result.law.optimum(flops)
    intervals: dict[str, tuple[float, float] | None] = dict.fromkeys(numbers)
    if result.resampled is not None:
        resampled = result.resampled.optimum(flops)
        intervals = {name: result.interval(values, confidence) for name, values in resampled.items()}
    n, d, loss = (float(numbers[name]) for name in ("N", "D", "loss"))
    return Optimum(flops, n, d, loss, intervals)
