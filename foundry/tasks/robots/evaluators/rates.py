"""Confidence interval of a success rate, and significance test for two policies on the same episodes."""

from math import comb, sqrt
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate by Wilson's score, which also holds near 0 and 1 and for few trials.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), p. 209: the
    rates p with |successes / trials - p| <= z sqrt(p (1 - p) / trials).

    Args:
        successes: from 0 to `trials`.
        trials: at least 1.
    """
    rate, spread = successes / trials, _Z**2 / trials
    middle = (rate + spread / 2) / (1 + spread)
    half = _Z * sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    # At 0 and 1 the bound equals the rate, which rounding errors would miss.
    return max(min(middle - half, rate), 0.0), min(max(middle + half, rate), 1.0)


def sign_test(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the hypothesis that two policies are equally good.

    This is McNemar's exact test on the episodes that only one of the policies solves, by the binomial distribution (Q.
    McNemar, "Note on the sampling error of the difference between correlated proportions or percentages", Psychometrika
    12 (1947)). Without such episodes the p-value is 1.

    Args:
        only_first: number of episodes that only the first policy solves.
        only_second: number of episodes that only the second policy solves.
    """
    trials = only_first + only_second
    tail = sum(comb(trials, count) for count in range(min(only_first, only_second) + 1))
    share: float = 2 * tail / 2**trials
    return min(1.0, share)
