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


def some_of(names, *default):
    """Parameters of a test: those of `default` run always, and the others where `long` tests run."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.long) for name in names]
