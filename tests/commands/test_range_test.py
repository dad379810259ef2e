"""Learning rate that a range test suggests: the steepest descent of the loss."""

import math
import random

import pytest

from foundry.commands.lr_find import FindOptions, RangeTest, range_figure

RATES = [1e-6 * 10 ** (k / 20) for k in range(121)]  # from 1e-6 to 1


_DRAWN = random.Random(0)
_NOISE = [_DRAWN.gauss(5, 0.1) for _ in RATES]


def falling(at, noise=0.0):
    """Return losses that fall by 3 around the rate `at` (logistic in the log of the rate) and diverge above 0.1."""
    generator = random.Random(0)
    return [
        5 - 3 / (1 + (at / rate) ** 2) + (30 * (rate - 0.1) if rate > 0.1 else 0) + generator.gauss(0, noise)
        for rate in RATES
    ]


@pytest.mark.parametrize(("at", "noise", "factor"), [(1e-3, 0.0, 1.01), (1e-4, 0.0, 1.01), (1e-3, 0.05, 1.6)])
def test_suggestion_is_the_rate_of_steepest_descent(at, noise, factor):
    found = RangeTest(RATES, falling(at, noise)).suggestion
    assert at / factor < found < at * factor


@pytest.mark.parametrize(
    "losses",
    [[5.0] * 121, [5 + k / 10 for k in range(121)], _NOISE],
    ids=["flat", "rising", "noise"],
)
def test_loss_that_does_not_fall_gives_no_suggestion(losses):
    assert RangeTest(RATES, losses).suggestion is None


def test_nan_as_last_loss_still_gives_a_suggestion_and_a_plot(tmp_path):
    losses = [*falling(1e-3)[:100], math.nan]
    found = RangeTest(RATES[:101], losses)
    assert found.suggestion == pytest.approx(1e-3, rel=0.01)
    figure = range_figure(found, "a run")
    figure.savefig(tmp_path / "picture.png")
    assert figure.axes[0].get_xscale() == "log"
    assert "steepest fall: 1.0e-03" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_smoothing_preserves_straight_lines():
    losses = [5 - 0.3 * math.log(rate) for rate in RATES]
    assert RangeTest(RATES, losses).smoothed == pytest.approx(losses)


def test_default_rates_grow_by_less_than_20_percent_per_step():
    options = FindOptions()
    assert (options.max / options.min) ** (1 / (options.steps - 1)) < 1.2
