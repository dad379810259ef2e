"""How many drawn examples a test looks at: all of them where `long` tests run as well, and else a fraction."""

from dataclasses import dataclass

FRACTION = 5


@dataclass
class _Selection:
    is_all: bool = False


selection = _Selection()


def examples(number):
    """Of so many."""
    return number if selection.is_all else max(1, number // FRACTION)
