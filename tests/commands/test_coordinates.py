"""Result of a coordinate check: slopes, verdict, table and picture."""

import math

import pytest

from foundry.commands.coordinates import CoordinateCheck, Layer, coordinate_figure, fit_slope

WIDTHS = [64, 128, 256]
POWERS = {"embedding": 0.0, "block 1": -0.1, "block 2": 0.15, "output": 0.0}


def result(**powers):
    """Return a check whose changes after step t are t x width ** power."""
    sizes, layers = [[0.5] * 3 for _ in WIDTHS], {}
    for name, power in {**POWERS, **powers}.items():
        layers[name] = Layer(sizes, [[step * width**power for step in (0.0, 1, 2)] for width in WIDTHS])
    return CoordinateCheck("mup", 1e-3, WIDTHS, 0.2, layers)


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5])
def test_slope_is_the_power_of_the_width(power):
    assert fit_slope(WIDTHS, [3 * width**power for width in WIDTHS]) == pytest.approx(power)


def test_layer_that_does_not_change_has_no_slope():
    check = result()
    unchanged = {**check.layers, "embedding": Layer([[0.5] * 3] * 3, [[0.0] * 3] * 3)}
    check = CoordinateCheck("mup", 1e-3, WIDTHS, 0.2, unchanged)
    assert check.slopes("embedding") == [None, None]
    assert check.is_independent
    assert check.table().splitlines()[1].split() == ["embedding", "0.00e+00", "0.00e+00", "0.00e+00"]
    assert CoordinateCheck("mup", 1e-3, WIDTHS, 0.2, {"output": unchanged["embedding"]}).verdict == "no layer changes"


def test_verdict_names_the_steepest_slope_in_either_direction():
    best = "independent of the width: the steepest slope is +0.15 (block 2, step 1), at most 0.2"
    assert result().verdict == best
    for power, step in ((1.0, 1), (-1.0, 2)):
        check = result(output=power)
        assert not check.is_independent
        steepest = f"the steepest slope is {power:+.2f} (output, step {step})"
        assert check.verdict == f"dependent on the width: {steepest}, above 0.2"


@pytest.mark.parametrize(("power", "is_independent"), [(1.0, False), (-1.0, True)])
def test_growth_in_an_early_step_counts_and_shrinking_does_not(power, is_independent):
    check = result()
    changes = [[0.0, width**power, 1.0] for width in WIDTHS]
    check = CoordinateCheck("mup", 1e-3, WIDTHS, 0.2, {**check.layers, "output": Layer([[0.5] * 3] * 3, changes)})
    assert check.is_independent is is_independent


def test_table_has_a_row_for_each_layer_and_a_column_for_each_width():
    header, *rows = result().table().splitlines()
    assert header.split() == ["layer", "64", "128", "256", "slope", "largest"]
    assert rows[1].split() == ["block", "1", *(f"{2 * width**-0.1:.2e}" for width in WIDTHS), "-0.10", "-0.10"]
    assert len({len(line) for line in (header, *rows)}) == 1


def test_numbers_have_all_measurements_and_slopes():
    numbers = result().numbers()
    assert numbers["layers"]["block 2"]["slopes"] == pytest.approx([0.15, 0.15])
    assert numbers["layers"]["block 1"]["changes"][2] == [0.0, 256**-0.1, 2 * 256**-0.1]
    assert (numbers["widths"], numbers["is_independent"]) == (WIDTHS, True)


def test_figure_shows_the_first_and_the_last_step_with_a_line_for_each_layer():
    figure = coordinate_figure(result(), "a run")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["after step 1", "after step 2"]
    for step, axes in enumerate(figure.axes, 1):
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert [list(line.get_ydata()) for line in axes.lines] == [
            pytest.approx([step * width**power for width in WIDTHS]) for power in POWERS.values()
        ]
    assert not any(math.isnan(value) for axes in figure.axes for line in axes.lines for value in line.get_ydata())
