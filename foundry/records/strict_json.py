"""JSON that every reader accepts: numbers JSON does not know are written as strings."""

import json
import math
from collections.abc import Mapping
from typing import Any

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any) -> str:
    """One line of strict JSON; NaN and the infinities become "NaN", "Infinity" and "-Infinity"."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_spelled(value), allow_nan=False, default=str)


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    return value


def decode(line: str) -> Any:
    """The value `encode` was given, floats again where they had been spelled.

    Raises:
        ValueError: the line is not JSON.
    """
    return _floats(json.loads(line))


def _floats(value: Any) -> Any:
    if isinstance(value, str):
        return _SPELLED.get(value, value)
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return value
