"""The law L(N, D) = E + A/N^alpha + B/D^beta, its fit to runs, and resampled fits.

Source: Hoffmann et al. (2022), arXiv:2203.15556, approach 3 in section 3.3 and appendix D.3. As Besiroglu et al. (2024,
arXiv:2404.10102) recommend, the losses of runs are summed instead of averaged, and the minimization ends only if the
gradient vanishes. Logarithms of N and D are centered here, which changes the coordinates but not the law.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
DELTA = 1e-3
"""Residual of a log-loss above which the Huber loss is linear."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""C = 6 N D (Kaplan et al., 2020, arXiv:2001.08361, section 2.1)."""
VARIABLES = ("N", "D")
NAMES: Mapping[str, tuple[str, str]] = {"N": ("A", "alpha"), "D": ("B", "beta")}
"""Names of coefficient and exponent in the term of each variable."""

_EXPONENTS, _SHARES = (0.1, 0.3, 1.0), (0.1, 0.5, 0.9)
_FEW_EXPONENTS, _FEW_SHARES = (0.5,), (0.5,)
_OPTIONS = {"gtol": 1e-4, "ftol": 1e-14, "maxiter": 5000, "maxfun": 10_000}
"""Options of L-BFGS-B. `gtol` bounds the gradient of the objective in units of delta squared."""
_SAME = 0.01
"""Largest difference of two logarithms that count as one value: 1 %."""
_COLLINEAR = 0.999
_DRAWS_PER_RESAMPLE = 2
LEAST_VALUES = 3
"""Number of different values that determine the coefficient and the exponent of a variable, and E."""


@dataclass(frozen=True)
class Law:
    """One law, or a batch of laws, in one or both variables.

    Attributes:
        variables: `N`, `D` or both, in this order.
        center: (len(variables),) mean of the logarithms of the fitted runs.
        theta: (..., 1 + 2 len(variables)) log E, then for each variable the logarithm of its term at the center and
            its exponent.
    """

    variables: tuple[str, ...]
    center: Floats
    theta: Floats

    def loss(self, points: Floats) -> Floats:
        """Return the losses (..., points) at points (points, len(variables)), which are not logarithms."""
        terms = np.tensordot(self.theta, _design(np.log(points) - self.center), axes=(-1, -1))
        losses: Floats = np.exp(np.logaddexp.reduce(terms, axis=-2))
        return losses

    def constants(self) -> dict[str, Floats]:
        """Return E, and coefficient and exponent of each variable, by name; each has the shape of the batch."""
        values = {"E": np.exp(self.theta[..., 0])}
        with np.errstate(over="ignore"):
            for index, variable in enumerate(self.variables):
                coefficient, exponent = NAMES[variable]
                slope = self.theta[..., 2 + 2 * index]
                values[coefficient] = np.exp(self.theta[..., 1 + 2 * index] + slope * self.center[index])
                values[exponent] = slope
        return values

    def optimum(self, flops: float) -> dict[str, Floats]:
        """Return the N and D with the lowest loss among all with 6 N D = `flops`, and that loss.

        All are NaN if an exponent is not positive.

        Both variables must be in the law. Source: Hoffmann et al. (2022), equation 4.
        """
        assert self.variables == VARIABLES
        e, a, alpha, b, beta = (self.theta[..., index] for index in range(5))
        log_a, log_b = a + alpha * self.center[0], b + beta * self.center[1]
        log_product = math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)
        with np.errstate(all="ignore"):
            ratio = np.log(alpha) + log_a - np.log(beta) - log_b
            log_n = np.where((alpha > 0) & (beta > 0), (ratio + beta * log_product) / (alpha + beta), np.nan)
            log_d = log_product - log_n
            loss = np.exp(e) + np.exp(log_a - alpha * log_n) + np.exp(log_b - beta * log_d)
            return {"N": np.exp(log_n), "D": np.exp(log_d), "loss": loss}


@dataclass(frozen=True)
class Fit:
    """A law and its uncertainty.

    Attributes:
        law: the fitted law.
        resampled: batch of laws, each fitted to as many runs drawn with replacement; None if there are too few runs.
        objective: sum of the Huber losses of all runs.
        residuals: (runs,) logarithm of measured over fitted loss.
        noise: (resamples,) residuals for predicted runs; length 0 without resamples.
    """

    law: Law
    resampled: Law | None
    objective: float
    residuals: Floats
    noise: Floats

    def interval(self, values: Floats, confidence: float) -> tuple[float, float] | None:
        """Return the percentile interval of a number over the resamples.

        Args:
            values: (resamples,) the number in each resampled law.
            confidence: fraction of the resamples in the interval.

        Returns:
            Both ends; None if there are no resamples, or if the number is finite in too few of them.
        """
        finite = values[np.isfinite(values)]
        if self.resampled is None or len(finite) < confidence * len(values):
            return None
        tail = (1 - confidence) / 2
        low, high = np.quantile(finite, [tail, 1 - tail])
        return float(low), float(high)

    def predict(self, point: Sequence[float], confidence: float) -> tuple[float, tuple[float, float] | None]:
        """Return the loss of another run and its interval, which includes the residual of a run.

        Args:
            point: (len(variables),) values of the variables.
            confidence: confidence of the interval.
        """
        points = np.asarray([point], dtype=np.float64)
        loss = float(self.law.loss(points)[0])
        if self.resampled is None:
            return loss, None
        return loss, self.interval(self.resampled.loss(points)[:, 0] * np.exp(self.noise), confidence)


class DesignError(ValueError):
    """The runs do not determine the law; the message has the reason and the remedy."""


def varying(points: Floats) -> tuple[str, ...]:
    """Return the variables with more than one value; values that differ by at most 1 % count as one.

    Args:
        points: (runs, 2) N and D of each run.
    """
    return tuple(name for index, name in enumerate(VARIABLES) if _levels(points[:, index]).max(initial=0) > 0)


def check_design(points: Floats, variables: Sequence[str]) -> None:
    """Check that runs can determine the law.

    Args:
        points: (runs, 2) N and D of each run.
        variables: variables of the law.

    Raises:
        DesignError: there are too few runs or values, or both variables change together.
    """
    needed = 1 + 2 * max(len(variables), 1)
    if len(points) < needed:
        raise DesignError(f"are {len(points)}, but the law has {needed} parameters; add jobs")
    if not variables:
        raise DesignError("have one N and one D; add jobs with other sizes or numbers of steps")
    for variable in variables:
        count = int(_levels(points[:, VARIABLES.index(variable)]).max()) + 1
        if count < LEAST_VALUES:
            remedy = f"add jobs with another {variable}"
            raise DesignError(f"have {count} values of {variable}, but its term needs {LEAST_VALUES}; {remedy}")
    if len(variables) == len(VARIABLES) and _correlation(np.log(points)) > _COLLINEAR:
        raise DesignError("change N and D together, so their terms cannot be separated; add jobs with other D for an N")


def fit(points: Floats, losses: Floats, variables: tuple[str, ...], *, resamples: int, seed: int) -> Fit:
    """Fit the law to runs, and to resampled runs for intervals.

    Args:
        points: (runs, 2) N and D of each run.
        losses: (runs,) positive final losses.
        variables: variables of the law; the other one is constant, and part of E.
        resamples: number of resampled fits.
        seed: seed of the resampling.

    Raises:
        DesignError: the runs do not determine the law.
    """
    check_design(points, variables)
    columns = [VARIABLES.index(variable) for variable in variables]
    logs = np.log(points[:, columns])
    center = logs.mean(axis=0)
    problem = _Problem(_design(logs - center), np.log(losses))
    theta, objective = problem.best(np.ones(len(losses)), problem.starts(_EXPONENTS, _SHARES))
    law, objective = Law(variables, center, theta), DELTA**2 * objective
    residuals = np.log(losses) - np.log(law.loss(points[:, columns]))
    rng = np.random.default_rng(seed)
    weights = _resample(points[:, columns], resamples, rng)
    if weights is None:
        return Fit(law, None, objective, residuals, np.empty(0))
    starts = [theta, *problem.starts(_FEW_EXPONENTS, _FEW_SHARES)]
    resampled = np.stack([problem.best(each, starts)[0] for each in weights])
    degrees = len(losses) - len(theta)
    scaled = residuals * np.sqrt(len(losses) / degrees) if degrees else np.zeros(1)
    noise = rng.choice(scaled, size=len(weights))
    return Fit(law, Law(variables, center, resampled), objective, residuals, noise)


def _design(logs: Floats) -> Floats:
    """Return the array (terms, runs, parameters) whose product with theta is the logarithm of each term.

    Args:
        logs: (runs, variables) centered logarithms of the variables.
    """
    runs, count = logs.shape
    design = np.zeros((1 + count, runs, 1 + 2 * count))
    design[0, :, 0] = 1
    for index in range(count):
        design[1 + index, :, 1 + 2 * index] = 1
        design[1 + index, :, 2 + 2 * index] = -logs[:, index]
    return design


@dataclass(frozen=True)
class _Problem:
    """The sum of Huber losses, in units of delta squared.

    Attributes:
        design: (terms, runs, parameters) see `_design`.
        targets: (runs,) logarithms of the losses.
    """

    design: Floats
    targets: Floats

    def starts(self, exponents: Sequence[float], shares: Sequence[float]) -> list[Floats]:
        """Return starting points (parameters,), whose terms add up to the mean loss at the center.

        Args:
            exponents: exponents of each variable.
            shares: shares of E in the loss; the other terms have equal parts of the rest.
        """
        count, middle = self.design.shape[-1] // 2, float(self.targets.mean())
        starts = list[Floats]()
        for share, powers in product(shares, product(exponents, repeat=count)):
            term = middle + math.log((1 - share) / count)
            starts.append(np.array([middle + math.log(share), *(x for power in powers for x in (term, power))]))
        return starts

    def best(self, weights: Floats, starts: Sequence[Floats]) -> tuple[Floats, float]:
        """Return the best minimizer (parameters,) from all starts, and its objective.

        Args:
            weights: (runs,) weight of each run.
            starts: starting points.
        """
        from scipy.optimize import minimize  # type: ignore[import-untyped]

        results = [
            minimize(self._objective, start, (weights,), method="L-BFGS-B", jac=True, options=_OPTIONS)
            for start in starts
        ]
        result = min(results, key=lambda each: float(each.fun))
        return result.x, float(result.fun)

    def _objective(self, theta: Floats, weights: Floats) -> tuple[float, Floats]:
        """Return the value and the gradient (parameters,)."""
        design = self.design.reshape(-1, len(theta))
        terms = (design @ theta).reshape(-1, len(weights))
        highest = terms.max(axis=0)
        parts = np.exp(terms - highest)
        total = parts.sum(axis=0)
        residuals = (highest + np.log(total) - self.targets) / DELTA
        slopes = np.clip(residuals, -1, 1)
        gradient: Floats = (weights * slopes / total / DELTA * parts).ravel() @ design
        return float(weights @ (slopes * (residuals - slopes / 2))), gradient


def _resample(points: Floats, resamples: int, rng: np.random.Generator) -> Floats | None:
    """Return the counts (resamples, runs) of the runs drawn for each resample.

    A draw that does not determine the law is repeated. None if more than half of the draws do not determine it.
    """
    runs, dim = points.shape
    levels = [_levels(points[:, index]) for index in range(dim)]
    logs, accepted = np.log(points), list[Floats]()
    for _ in range(_DRAWS_PER_RESAMPLE * resamples):
        if len(accepted) == resamples:
            break
        counts = np.bincount(rng.integers(runs, size=runs), minlength=runs).astype(np.float64)
        drawn = counts > 0
        has_values = all(len(np.unique(level[drawn])) >= LEAST_VALUES for level in levels)
        if drawn.sum() >= 1 + 2 * dim and has_values and (dim == 1 or _correlation(logs[drawn]) <= _COLLINEAR):
            accepted.append(counts)
    return np.stack(accepted) if len(accepted) == resamples else None


def _levels(values: Floats) -> NDArray[np.intp]:
    """Return the index of each value among the different values, ascending."""
    logs = np.log(values)
    order = np.argsort(logs, kind="stable")
    indices = np.empty(len(values), dtype=np.intp)
    indices[order] = np.cumsum(np.concatenate([[0], np.diff(logs[order]) > _SAME])) if len(values) else 0
    return indices


def _correlation(logs: Floats) -> float:
    first, second = logs.T
    return float(abs(np.atleast_2d(np.corrcoef(first, second))[0, 1]))
