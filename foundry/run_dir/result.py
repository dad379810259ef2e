"""`result.json` of a run directory: the results of a finished run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundry.run_dir.files import read_text, write_atomically
from foundry.run_dir.names import RESULT
from foundry.run_dir.strict_json import decode, encode, read_object


def read_result(run_dir: Path) -> dict[str, Any]:
    """Return the content of `result.json`.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFileError: the file cannot be read, or is not a JSON object.
    """
    return read_object(run_dir / RESULT)


def find_result(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of `result.json`; None if it is missing or damaged, so that the caller writes it again.

    Raises:
        UnsafeFileError: the path is not a regular file.
    """
    try:
        result = decode(read_text(run_dir / RESULT))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def write_result(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Write `result.json`, and return after it is on disk."""
    text = json.dumps(json.loads(encode(result)), indent=2) + "\n"
    write_atomically(run_dir / RESULT, text, durable=True)
