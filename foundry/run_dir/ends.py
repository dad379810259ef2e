"""Records of failures: notes for the process that started this one, `status.json`, `foundry.log` and stack dumps."""

import faulthandler
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foundry.run_dir.files import make_folder, open_regular, read_text, write_atomically
from foundry.run_dir.lock import is_held
from foundry.run_dir.names import LOG, STACKS
from foundry.run_dir.redact import one_line, printable
from foundry.run_dir.status import read_status, write_status

_PATIENCE_SECONDS = 3.0

NOTES = "FOUNDRY_NOTES"
"""Environment variable with the private folder (mode 0700) for failure notes; unset if no process reads the notes."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the error file of this process; torchrun sets it and reads the file."""

# Error classes and texts of a rank that failed because a peer died; the error of the peer is reported instead.
_CONSEQUENCES = ("CollectiveError", "DistBackendError", "DistNetworkError", "DistStoreError")
_CONSEQUENCE_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")


def is_consequence(kind: str, reason: str) -> bool:
    """Return whether a rank's error of class `kind` only reports the loss of another rank."""
    return kind in _CONSEQUENCES or any(text in reason for text in _CONSEQUENCE_TEXTS)


def leave_note(
    *,
    kind: str,
    reason: str,
    exit_code: int,
    trace: str = "",
    rank: int | None = None,
    violations: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the reason of this process's failure for the process that started it.

    A process that foundry started writes to the folder in FOUNDRY_NOTES, another process to TORCHELASTIC_ERROR_FILE.
    Does nothing without these variables.

    Args:
        kind: class name of the error.
        reason: one line.
        exit_code: exit code for the whole run.
        trace: traceback of the error.
        rank: the rank that caused the failure; by default the rank of this process.
        violations: key and message of each configuration error, if the configuration was rejected.
    """
    rank_text = os.environ.get("RANK", "")
    own_rank = int(rank_text) if rank_text.isdecimal() else 0  # the failure may be that the variable is invalid
    note = {
        "rank": own_rank if rank is None else rank,
        "time": time.time(),
        "kind": kind,
        "reason": reason,
        "trace": trace,
        "exit_code": exit_code,
        "violations": list(violations),
    }
    if (folder := os.environ.get(NOTES)) is not None:
        write_atomically(Path(folder) / f"rank{own_rank}.json", json.dumps(note))
    elif path := os.environ.get(ERROR_FILE):
        with suppress(OSError):  # the error itself matters more than its report
            write_atomically(Path(path), json.dumps(_error_report(note)))


def _error_report(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return a failure note in the format that torch.distributed.elastic.multiprocessing.errors reads.

    torchrun prints `py_callstack`, by default `message`, and reports the error with the earliest `timestamp` as the
    cause.
    """
    reason = one_line(note["reason"])
    details = {key: note[key] for key in ("rank", "kind", "exit_code")}
    details |= {"time": datetime.fromtimestamp(note["time"], UTC).isoformat(timespec="milliseconds")}
    details |= {"timestamp": str(int(note["time"]))}
    if note["trace"]:
        details["py_callstack"] = printable(f"{reason}\n{note['trace']}")
    return {"message": {"message": reason, "errorCode": note["exit_code"], "extraInfo": details}}


def find_cause() -> str | None:
    """Return rank and reason of the first failure on this node, for a rank that only lost another one.

    Ranks write their failures into torchrun's error files, each in a folder with the local rank as its name.

    Returns:
        One line; None if no rank of this node has reported a cause, or torchrun has not started this process.
    """
    own = Path(os.environ.get(ERROR_FILE, ""))
    if NOTES in os.environ or own.parent.name != os.environ.get("LOCAL_RANK"):
        return None
    causes = list[tuple[str, str]]()
    for path in own.parent.parent.glob(f"*/{own.name}"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # unreadable, or not written by foundry
            error = json.loads(read_text(path))["message"]
            details, reason = error["extraInfo"], str(error["message"])
            if not is_consequence(details["kind"], reason):
                causes.append((str(details["time"]), f"rank {details['rank']} failed: {reason}"))
    return min(causes)[1] if causes else None


def record_end(run_dir: Path, reason: str, details: str = "") -> None:
    """Record the failure of a run in its `status.json` and `foundry.log`.

    For a process of the run that detects the failure and may be the last one alive.

    Args:
        run_dir: the run directory.
        reason: one line, for `status.json`.
        details: text for `foundry.log`.
    """
    write_status(run_dir, state="failed", reason=one_line(reason))
    with open_regular(run_dir / LOG, "a") as file:
        file.write(printable(f"{reason}\n{details}"))


def dump_stacks(run_dir: Path, rank: int, step: int, activity: str) -> None:
    """Write the stacks of all threads of this process to a file, which replaces an earlier file of the same rank.

    Args:
        run_dir: the run directory.
        rank: rank of this process.
        step: current optimizer step.
        activity: current activity.
    """
    make_folder(run_dir / STACKS)
    with open_regular(_stacks(run_dir, rank), "w") as file:
        file.write(f"step {step}, {activity}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def read_positions(run_dir: Path, rank: int, world_size: int, seconds: float) -> dict[int, tuple[int, str]] | None:
    """Return optimizer step and activity of each rank whose stack dump is about as recent as this rank's.

    Args:
        run_dir: the run directory.
        rank: rank of this process.
        world_size: number of ranks.
        seconds: how much older than the stack dump of this rank another rank's may be.

    Returns:
        Step and activity by rank; None if this rank has no stack dump.
    """
    positions = dict[int, tuple[int, str]]()
    try:
        earliest = _stacks(run_dir, rank).stat().st_mtime - seconds
    except OSError:
        return None
    for other_rank in range(world_size):
        path = _stacks(run_dir, other_rank)
        with suppress(OSError, ValueError):
            position = re.match(r"step (\d+), (.*)", read_text(path))
            if position is not None and path.stat().st_mtime > earliest:
                positions[other_rank] = int(position[1]), one_line(position[2])
    return positions


def _stacks(run_dir: Path, rank: int) -> Path:
    return run_dir / STACKS / f"rank-{rank:05d}.txt"


def record_if_dead(run_dir: Path, reason: str, *, seconds: float = _PATIENCE_SECONDS) -> None:
    """Record the failure of a run if the process that should record it is dead, for example because it was killed.

    That process holds the lock of the run directory until it has written `status.json` itself. If the lock is free and
    the state is still "running", any process may write the file. Nothing is written if the lock is still held after
    `seconds`, or not visible, as from another machine.

    Args:
        run_dir: the run directory.
        reason: one line.
        seconds: how long to wait for that process, which may be about to write `status.json`.
    """
    deadline = time.monotonic() + seconds
    while read_status(run_dir).get("state") == "running":
        if is_held(run_dir) is False:
            record_end(run_dir, reason)
        elif time.monotonic() < deadline:
            time.sleep(0.1)
        else:
            return
