"""JSON that every reader accepts: NaN and infinities are written as strings."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foundry.run_dir.files import UnsafeFileError, read_text

Types = type | tuple[type, ...]

_SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class DamagedFileError(ValueError):
    """A JSON file is unreadable or not as foundry writes it; the message contains the path and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


def read_object(
    path: Path, *, required: Mapping[str, Types] | None = None, optional: Mapping[str, Types] | None = None
) -> dict[str, Any]:
    """Return the JSON object in a file of a run directory, which may be damaged or written by someone else.

    Args:
        path: the file.
        required: types of the required values, by name.
        optional: types of the optional values, by name.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFileError: the file cannot be read, is not a JSON object, lacks a value, or has a value of another type.
    """
    try:
        value = decode(read_text(path))
    except FileNotFoundError:
        raise
    except UnsafeFileError as error:
        raise DamagedFileError(path, str(error.strerror)) from None
    except OSError as error:
        raise DamagedFileError(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise DamagedFileError(path, "is empty or not JSON") from None
    if not isinstance(value, dict):
        raise DamagedFileError(path, "contains no JSON object")
    check_types(path, value, required=required, optional=optional)
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as `read_object` does; an empty object if the file does not exist."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each leaf of nested objects; the name joins the names of all levels by dots."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_types(
    path: Path,
    value: Mapping[str, Any],
    *,
    required: Mapping[str, Types] | None = None,
    optional: Mapping[str, Types] | None = None,
) -> None:
    """Check that an object from a file has all required values, and the types that foundry writes.

    Raises:
        DamagedFileError: a value is missing or has another type; the message names the first such value.
    """
    for name, types in {**(optional or {}), **(required or {})}.items():
        if name not in value:
            if required and name in required:
                raise DamagedFileError(path, f"has no {name}")
        elif not isinstance(value[name], types):
            raise DamagedFileError(path, f"has a {name} of type {type(value[name]).__name__}")


def encode(value: Any) -> str:
    """Return one line of strict JSON; NaN and infinities become "NaN", "Infinity" and "-Infinity"."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_encode_floats(value), allow_nan=False, default=str)


def _encode_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _encode_floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_floats(item) for item in value]
    return value


def decode(line: str) -> Any:
    """Return the value of a line written by `encode`; "NaN", "Infinity" and "-Infinity" become floats.

    Raises:
        ValueError: the line is not JSON.
    """
    value = json.loads(line)
    return _decode_floats(value) if any(word in line for word in _SPECIAL_FLOATS) else value


def _decode_floats(value: Any) -> Any:
    if isinstance(value, str):
        return _SPECIAL_FLOATS.get(value, value)
    if isinstance(value, dict):
        return {key: _decode_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode_floats(item) for item in value]
    return value
