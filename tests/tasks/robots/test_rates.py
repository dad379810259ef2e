import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from foundry.tasks.robots.evaluators.rates import sign_test, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine 17 (1998).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_matches_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10**6).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_wilson_interval_contains_the_rate_and_is_symmetric(given_rate):
    successes, trials = given_rate
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert wilson_interval(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    assert low == 0 if successes == 0 else low > 0
    assert high == 1 if successes == trials else high < 1


@given(st.integers(0, 300), st.integers(0, 300))
def test_sign_test_equals_the_exact_binomial_test(first, second):
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert math.isclose(sign_test(first, second), expected, rel_tol=1e-9)
