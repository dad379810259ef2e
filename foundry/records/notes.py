"""What a process that fails leaves for the one that started it and the others of its run."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from foundry.records.files import write_atomically

NOTES = "FOUNDRY_NOTES"
"""The variable that names the folder for them, which is this user's alone; unset where nobody reads them."""


def leave_note(
    *,
    kind: str,
    reason: str,
    trace: str = "",
    rank: int | None = None,
    exit_code: int = 1,
    violations: Sequence[tuple[str, str]] = (),
) -> None:
    """Say why this process fails, where somebody asked for that.

    Args:
        kind: the class of the error.
        reason: one line.
        trace: its traceback.
        rank: whose fault it is; this process's own by default.
        exit_code: what the whole run should end with.
        violations: key and message of each, where the configuration is refused.
    """
    if (folder := os.environ.get(NOTES)) is None:
        return
    own = int(os.environ["RANK"])
    note = {
        "rank": own if rank is None else rank,
        "time": time.time(),
        "kind": kind,
        "reason": reason,
        "trace": trace,
        "exit_code": exit_code,
        "violations": list(violations),
    }
    write_atomically(Path(folder) / f"rank{own}.json", json.dumps(note))
