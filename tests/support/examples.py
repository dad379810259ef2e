"""Which examples a test looks at: all of them where `long` tests run as well, and else a part."""

from dataclasses import dataclass

import pytest

FRACTION = 5


@dataclass
class _Selection:
    is_all: bool = False


selection = _Selection()


def examples(number):
    """Of so many."""
    return number if selection.is_all else max(1, number // FRACTION)


def long_case(*values):
    """Parameters of a test that runs where `long` tests run."""
    return pytest.param(*values, marks=pytest.mark.long)


def some_of(values, *default):
    """Parameters of a test: those of `default` run always, and the others where `long` tests run."""
    return [value if value in default else long_case(value) for value in values]
