"""Minimization of many small problems at once, by BFGS in float64."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Objective: TypeAlias = Callable[[Floats, NDArray[np.intp]], tuple[Floats, Floats]]
"""Function of points (batch, dim) and the indices (batch,) of their problems; returns values (batch,), gradients."""

_ARMIJO, _CURVATURE = 1e-4, 0.9
_SEARCH_STEPS = 40


def minimize(
    objective: Objective,
    starts: Floats,
    *,
    step: float,
    max_iterations: int,
    tolerance: float,
    decrease: float = 1e-14,
) -> tuple[Floats, Floats]:
    """Minimize a batch of independent functions of few variables by BFGS (Nocedal and Wright, 2006, chapter 6).

    The line search bisects until the weak Wolfe conditions hold, which also works at kinks (Lewis and Overton, 2013). A
    problem ends if its gradient is small, its value no longer decreases, or it has used all iterations. Problems do not
    influence each other, so a problem has the same result in any batch.

    Args:
        objective: returns the values and the gradients of some of the problems.
        starts: (batch, dim) starting points.
        step: scale of the first inverse Hessian, which is a multiple of the identity.
        max_iterations: maximum number of iterations of a problem.
        tolerance: a problem has converged if no entry of its gradient exceeds this.
        decrease: a problem has converged if an iteration reduces its value by less than this fraction.

    Returns:
        Minimizers (batch, dim) and their values (batch,).
    """
    points, rows = starts.copy(), np.arange(len(starts))
    values, gradients = objective(points, rows)
    dim = starts.shape[1]
    inverse = np.broadcast_to(step * np.eye(dim), (len(starts), dim, dim)).copy()
    for _ in range(max_iterations):
        rows = rows[np.abs(gradients[rows]).max(axis=1) > tolerance]
        if not len(rows):
            break
        slopes, directions = _descent(inverse, gradients, rows, step)
        new_points, new_values, new_gradients = _search(objective, rows, points[rows], values[rows], slopes, directions)
        has_moved = values[rows] - new_values > decrease * np.abs(values[rows])
        moves, changes = new_points - points[rows], new_gradients - gradients[rows]
        is_better = new_values < values[rows]
        points[rows[is_better]], values[rows[is_better]] = new_points[is_better], new_values[is_better]
        gradients[rows[is_better]] = new_gradients[is_better]
        _update(inverse, rows, moves, changes)
        rows = rows[has_moved]
    return points, values


def _descent(inverse: Floats, gradients: Floats, rows: NDArray[np.intp], step: float) -> tuple[Floats, Floats]:
    """Return slopes and directions of descent; a problem without one gets a new inverse Hessian."""
    directions = -np.einsum("bij,bj->bi", inverse[rows], gradients[rows])
    slopes = np.einsum("bi,bi->b", directions, gradients[rows])
    is_wrong = ~(slopes < 0)
    if is_wrong.any():
        inverse[rows[is_wrong]] = step * np.eye(gradients.shape[1])
        directions[is_wrong] = -step * gradients[rows[is_wrong]]
        slopes[is_wrong] = np.einsum("bi,bi->b", directions[is_wrong], gradients[rows[is_wrong]])
    return slopes, directions


def _search(
    objective: Objective,
    rows: NDArray[np.intp],
    points: Floats,
    values: Floats,
    slopes: Floats,
    directions: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Return points, values and gradients along the directions that satisfy the weak Wolfe conditions."""
    low, high, length = np.zeros(len(rows)), np.full(len(rows), np.inf), np.ones(len(rows))
    best_points, best_values, best_gradients = points.copy(), values.copy(), np.zeros_like(points)
    is_open = np.arange(len(rows))
    for _ in range(_SEARCH_STEPS):
        trial = points[is_open] + length[is_open, None] * directions[is_open]
        trial_values, trial_gradients = objective(trial, rows[is_open])
        is_low = trial_values <= values[is_open] + _ARMIJO * length[is_open] * slopes[is_open]
        new_slopes = np.einsum("bi,bi->b", trial_gradients, directions[is_open])
        is_flat = new_slopes >= _CURVATURE * slopes[is_open]
        kept = is_open[is_low]
        best_points[kept], best_values[kept] = trial[is_low], trial_values[is_low]
        best_gradients[kept] = trial_gradients[is_low]
        low[kept] = length[kept]
        high[is_open[~is_low]] = length[is_open[~is_low]]
        is_open = is_open[~(is_low & is_flat)]
        if not len(is_open):
            break
        middle = (low[is_open] + high[is_open]) / 2
        length[is_open] = np.where(np.isinf(high[is_open]), 2 * length[is_open], middle)
    return best_points, best_values, best_gradients


def _update(inverse: Floats, rows: NDArray[np.intp], moves: Floats, changes: Floats) -> None:
    """Update the inverse Hessians in place, except those whose curvature along the move is not positive."""
    curvature = np.einsum("bi,bi->b", moves, changes)
    lengths = np.linalg.norm(moves, axis=1) * np.linalg.norm(changes, axis=1)
    is_valid = curvature > 1e-12 * lengths
    rows, moves, changes, curvature = rows[is_valid], moves[is_valid], changes[is_valid], curvature[is_valid]
    if not len(rows):
        return
    scaled = np.einsum("bij,bj->bi", inverse[rows], changes)
    outer = np.einsum("bi,bj->bij", moves, scaled)
    factor = (1 + np.einsum("bi,bi->b", changes, scaled) / curvature) / curvature
    inverse[rows] += factor[:, None, None] * np.einsum("bi,bj->bij", moves, moves)
    inverse[rows] -= (outer + outer.transpose(0, 2, 1)) / curvature[:, None, None]
