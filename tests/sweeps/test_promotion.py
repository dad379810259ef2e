"""Promotions of asynchronous successive halving."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.sweeps.search.promotion import Climb, next_promotion

RESULTS = st.one_of(st.floats(-9, 9), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
CLIMBS = st.lists(
    st.builds(
        lambda values, state: (tuple(values), state),
        st.lists(RESULTS, max_size=3),
        st.sampled_from(["paused", "running", "failed"]),
    ),
    max_size=20,
).map(
    lambda found: [
        Climb(trial=n, values=values, is_paused=state == "paused" and len(values) > 0, has_failed=state == "failed")
        for n, (values, state) in enumerate(found)
    ]
)
SETTINGS = {"reduction_factor": st.integers(2, 5), "minimize": st.booleans()}


def num_better(climb, climbs, rung, *, minimize):
    """Return the number of trials that are better than `climb` at a rung."""
    sign = 1 if minimize else -1
    results = [(sign * other.values[rung - 1], other.trial) for other in climbs if len(other.values) >= rung]
    return sum(result < (sign * climb.values[rung - 1], climb.trial) for result in results if math.isfinite(result[0]))


def size(climbs, rung):
    """Return the number of results at a rung, including trials that failed on the way to it."""
    return sum(len(c.values) >= rung or (c.has_failed and len(c.values) == rung - 1) for c in climbs)


def is_promotable(climb, climbs, *, reduction_factor, minimize):
    rung = len(climb.values)
    if not climb.is_paused or not math.isfinite(climb.values[-1]):
        return False
    return num_better(climb, climbs, rung, minimize=minimize) < size(climbs, rung) // reduction_factor


@settings(max_examples=examples(500), deadline=None)
@given(climbs=CLIMBS, **SETTINGS)
def test_promoted_trial_is_the_best_paused_one_in_the_top_of_the_highest_rung(climbs, reduction_factor, minimize):
    number = next_promotion(climbs, reduction_factor=reduction_factor, minimize=minimize)
    promotable = [c for c in climbs if is_promotable(c, climbs, reduction_factor=reduction_factor, minimize=minimize)]
    if number is None:
        assert promotable == []
        return
    chosen = climbs[number]
    assert chosen in promotable
    assert len(chosen.values) == max(len(climb.values) for climb in promotable)
    rivals = [climb for climb in promotable if len(climb.values) == len(chosen.values)]
    assert num_better(chosen, rivals, len(chosen.values), minimize=minimize) == 0


@settings(max_examples=examples(100), deadline=None)
@given(climbs=CLIMBS, seed=st.integers(0, 99), **SETTINGS)
def test_promotion_depends_neither_on_order_nor_on_the_direction_of_the_metric(
    climbs, seed, reduction_factor, minimize
):
    number = next_promotion(climbs, reduction_factor=reduction_factor, minimize=minimize)
    negative = [replace(climb, values=tuple(-value for value in climb.values)) for climb in climbs]
    random.Random(seed).shuffle(negative)
    assert next_promotion(negative, reduction_factor=reduction_factor, minimize=not minimize) == number


@settings(max_examples=examples(100), deadline=None)
@given(
    factor=st.integers(2, 4), rungs=st.integers(1, 3), extra=st.integers(0, 9), places=st.integers(1, 4), data=st.data()
)
def test_search_promotes_each_trial_once_per_rung_and_completes_at_least_one(factor, rungs, extra, places, data):
    """A free place gets a promotion, else a new trial; running trials end in any order, and none fails."""
    num_trials = factor**rungs + extra
    climbs, running, promotions = [], [], []
    while True:
        while len(running) < places:
            number = next_promotion(climbs, reduction_factor=factor, minimize=True)
            if number is not None:
                promotions.append((number, len(climbs[number].values)))
                climbs[number] = replace(climbs[number], is_paused=False)
            elif len(climbs) < num_trials:
                number = len(climbs)
                climbs.append(Climb(trial=number, values=()))
            else:
                break
            running.append(number)
        if not running:
            break
        climb = climbs[running.pop(data.draw(st.integers(0, len(running) - 1)))]
        if len(climb.values) < rungs:
            value = data.draw(st.floats(0, 1))
            climbs[climb.trial] = replace(climb, values=(*climb.values, value), is_paused=True)
    assert len(set(promotions)) == len(promotions)
    for rung in range(1, rungs + 1):
        num_reached = sum(len(climb.values) >= rung for climb in climbs)
        num_promoted = sum(at == rung for _, at in promotions)
        assert num_promoted >= num_reached // factor >= factor ** (rungs - rung)
        best = sorted((climb.values[rung - 1], climb.trial) for climb in climbs if len(climb.values) >= rung)
        assert {(trial, rung) for _, trial in best[: num_reached // factor]} <= set(promotions)


@pytest.mark.parametrize("factor", [2, 3])
def test_failed_trials_and_trials_without_a_finite_metric_are_last(factor):
    good = Climb(trial=0, values=(5.0,), is_paused=True)
    bad = [
        Climb(trial=1, values=(math.nan,), is_paused=True),
        Climb(trial=2, values=(), has_failed=True),
    ]
    assert next_promotion([good, *bad[: factor - 1]], reduction_factor=factor, minimize=True) == 0
    assert next_promotion([replace(good, is_paused=False), *bad], reduction_factor=factor, minimize=True) is None
