"""Number of examples and cases per test: all if `long` tests are selected, otherwise a fraction."""

from dataclasses import dataclass

import pytest

FRACTION = 5


@dataclass
class _Selection:
    """State of `examples`.

    Attributes:
        is_all: all examples are selected.
        has_reduced: `examples` has reduced a number since this was last set to False.
    """

    is_all: bool = False
    has_reduced: bool = False


selection = _Selection()


def examples(number):
    """Return the number of examples to run, of `number` in total. Call it in a test or in the settings of one."""
    if selection.is_all:
        return number
    selection.has_reduced = True
    return max(1, number // FRACTION)


def long_case(*values):
    """Return parameters of a case that runs only if `long` tests are selected."""
    return pytest.param(*values, marks=pytest.mark.long)


def some_of(values, *default):
    """Return parameters of cases: cases in `default` always run, the rest only if `long` tests are selected."""
    return [value if value in default else long_case(value) for value in values]
