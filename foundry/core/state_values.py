"""Readers of values in a saved state, which may come from an untrusted file; each value is checked when it is read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foundry.core.errors import as_text

_MOST = 2**63


def read_count(state: Mapping[str, Any], name: str) -> int:
    """Return the value `name` of a state, an integer from 0 to 2**63 - 1.

    Raises:
        ValueError: the value is not an integer in this range; the message contains `name`.
    """
    value = state[name]
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{name}={as_text(value)} is not a non-negative whole number")
    return value


def read_optional_count(state: Mapping[str, Any], name: str) -> int | None:
    """Return the value `name` of a state: None, or an integer as in `read_count`."""
    return None if state[name] is None else read_count(state, name)


def read_optional_number(state: Mapping[str, Any], name: str) -> float | None:
    """Return the value `name` of a state: a finite number as saved (int or float), or None.

    Raises:
        ValueError: the value is another one; the message contains `name`.
    """
    value: float | None = state[name]
    if value is not None and not _is_finite(value):
        raise ValueError(f"{name}={as_text(value)} is neither a finite number nor null")
    return value


def read_numbers(state: Mapping[str, Any], name: str) -> Sequence[float]:
    """Return the value `name` of a state, a list of finite numbers.

    Raises:
        ValueError: the value is not a list of finite numbers; the message contains `name`.
    """
    values: Sequence[float] = state[name]
    if not isinstance(values, list) or not all(map(_is_finite, values)):
        raise ValueError(f"{name}={as_text(values)} is not a list of finite numbers")
    return values


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type] # int or float
    except OverflowError:  # an integer too large for a float
        return False
