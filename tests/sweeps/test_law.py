"""Fits of L(N, D) = E + A/N^alpha + B/D^beta to synthetic runs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.sweeps.scaling.law import DesignError, fit, varying

SIZES, TOKENS = (1e5, 4e5, 1.6e6, 6.4e6), (1e7, 4e7, 1.6e8, 6.4e8)
GRID = np.array(list(itertools.product(SIZES, TOKENS)))
CENTER = np.exp(np.log(GRID).mean(axis=0))
KNOWN = {"E": 1.7, "A": 60.0, "alpha": 0.34, "B": 150.0, "beta": 0.28}


def law(points, E, A, alpha, B, beta):
    return E + A / points[:, 0] ** alpha + B / points[:, 1] ** beta


def noisy(points, seed, size=0.003, **constants):
    rng = np.random.default_rng(seed)
    return law(points, **KNOWN | constants) * np.exp(size * rng.normal(size=len(points)))


@settings(max_examples=4, deadline=None)
@given(
    first=st.floats(0.15, 0.8),
    second=st.floats(0.15, 0.8),
    least=st.floats(0.5, 3.0),
    terms=st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 2.0)),
)
def test_fit_recovers_any_law_from_exact_losses(first, second, least, terms):
    a, b = terms[0] * CENTER[0] ** first, terms[1] * CENTER[1] ** second
    losses = law(GRID, least, a, first, b, second)
    found = fit(GRID, losses, varying(GRID), resamples=1, seed=0)
    constants = {name: float(value) for name, value in found.law.constants().items()}
    assert constants == pytest.approx({"E": least, "A": a, "alpha": first, "B": b, "beta": second}, rel=1e-3)
    far = np.array([[1e9, 1e11]])
    assert found.law.loss(far)[0] == pytest.approx(law(far, least, a, first, b, second)[0], rel=1e-4)


@pytest.mark.parametrize(("seeds", "resamples"), [(1, 40), pytest.param(20, 100, marks=pytest.mark.long)])
def test_intervals_contain_the_known_constants_in_most_noisy_sweeps(seeds, resamples):
    covered, larger = [], np.array([[6.4e7, 6.4e9]])
    for seed in range(seeds):
        found = fit(GRID, noisy(GRID, seed), ("N", "D"), resamples=resamples, seed=seed)
        resampled = found.resampled.constants()
        intervals = {name: found.interval(resampled[name], 0.95) for name in KNOWN}
        covered += [low <= KNOWN[name] <= high for name, (low, high) in intervals.items()]
        loss, (low, high) = found.predict(larger[0], 0.95)
        covered.append(low <= law(larger, **KNOWN)[0] <= high)
        assert low < loss < high
    assert len(covered) == 6 * seeds
    assert np.mean(covered) >= 0.8


@pytest.mark.parametrize(("variable", "column", "names"), [("N", 0, ("A", "alpha")), ("D", 1, ("B", "beta"))])
def test_reduced_law_contains_the_constant_term_in_e(variable, column, names):
    points = GRID[GRID[:, 1 - column] == GRID[0, 1 - column]]
    points = points * np.exp(np.where(np.arange(2) == column, 0, 0.004) * np.arange(len(points))[:, None] / 4)
    assert varying(points) == (variable,)
    other = ("B", "beta") if variable == "N" else ("A", "alpha")
    constant = KNOWN[other[0]] / GRID[0, 1 - column] ** KNOWN[other[1]]
    values = points[:, column]
    losses = KNOWN["E"] + constant + KNOWN[names[0]] / values ** KNOWN[names[1]]
    constants = fit(points, losses, (variable,), resamples=1, seed=0).law.constants()
    expected = {"E": KNOWN["E"] + constant, **{name: KNOWN[name] for name in names}}
    assert {name: float(value) for name, value in constants.items()} == pytest.approx(expected, rel=1e-3)


def test_one_outlier_does_not_move_the_fit():
    losses = noisy(GRID, 3, size=0.001)
    wrong = losses.copy()
    wrong[9] *= 1.4
    clean, found = (fit(GRID, each, ("N", "D"), resamples=1, seed=0) for each in (losses, wrong))
    far = np.array([[6.4e7, 6.4e9]])
    assert found.law.loss(far)[0] == pytest.approx(clean.law.loss(far)[0], rel=0.01)
    assert np.argmax(np.abs(found.residuals)) == 9
    assert found.residuals[9] == pytest.approx(math.log(1.4), abs=0.01)


def test_seed_determines_the_intervals_but_not_the_law():
    losses = noisy(GRID, 1)
    first, again, other = (fit(GRID, losses, ("N", "D"), resamples=10, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.resampled.theta, again.resampled.theta)
    assert first.predict(GRID[0], 0.9) == again.predict(GRID[0], 0.9)
    assert np.array_equal(first.law.theta, other.law.theta)
    assert first.predict(GRID[0], 0.9)[1] != other.predict(GRID[0], 0.9)[1]


def test_optimum_has_the_lowest_loss_for_its_compute():
    found = fit(GRID, noisy(GRID, 2), ("N", "D"), resamples=1, seed=0).law
    for flops in (1e13, 1e18):
        best = {name: float(value) for name, value in found.optimum(flops).items()}
        assert 6 * best["N"] * best["D"] == pytest.approx(flops)
        sizes = best["N"] * np.geomspace(0.25, 4, 201)
        losses = found.loss(np.column_stack([sizes, flops / 6 / sizes]))
        assert np.argmin(losses) == 100
        assert losses.min() == pytest.approx(best["loss"])


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (GRID[:2], "are 2, but the law has 3 parameters"),
        (GRID[[0, 1, 4, 5]], "are 4, but the law has 5 parameters"),
        (GRID[:8], "have 2 values of N, but its term needs 3"),
        (GRID[GRID[:, 1] <= 4e7], "have 2 values of D, but its term needs 3"),
        (np.array([[size, 20 * size] for size in np.geomspace(1e5, 1e7, 6)]), "change N and D together"),
        (np.repeat(GRID[:1], 5, axis=0), "have one N and one D"),
        (GRID[:0], "are 0, but the law has 3 parameters"),
    ],
)
def test_runs_that_do_not_determine_the_law_are_refused(points, message):
    with pytest.raises(DesignError, match=message):
        fit(points, np.ones(len(points)), varying(points), resamples=10, seed=0)


def test_smallest_design_has_a_law_but_no_intervals():
    points = GRID[[0, 1, 2, 4, 8]]
    found = fit(points, law(points, **KNOWN), ("N", "D"), resamples=50, seed=0)
    assert found.resampled is None
    assert found.predict([1e6, 1e8], 0.95)[1] is None
    assert np.abs(found.residuals).max() < 1e-4
