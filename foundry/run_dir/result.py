"""`result.json` of a run directory: what came of a run that has finished."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundry.run_dir.files import read_text, write_atomically
from foundry.run_dir.names import RESULT
from foundry.run_dir.strict_json import decode, encode, read_object


def read_result(run_dir: Path) -> dict[str, Any]:
    """What the file says.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it is not what foundry writes.
    """
    return read_object(run_dir / RESULT)


def find_result(run_dir: Path) -> dict[str, Any] | None:
    """What the file says; None where it was lost or damaged, so that the run has to end once more.

    Raises:
        UnsafeFileError: there is something in its place that is no regular file.
    """
    try:
        result = decode(read_text(run_dir / RESULT))
    except (FileNotFoundError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def write_result(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Write the file; it is on the disk when this returns."""
    text = json.dumps(json.loads(encode(result)), indent=2) + "\n"
    write_atomically(run_dir / RESULT, text, durable=True)
