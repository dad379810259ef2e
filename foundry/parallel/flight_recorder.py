"""Recording of the latest collectives with torch's flight recorder, dumped if ranks wait too long for each other.

`torchfrtrace FOLDER` compares the dumps of the ranks and names the collective that only some of them have started.
"""

import os
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d

from foundry.run_dir.files import make_folder, open_regular
from foundry.run_dir.names import FLIGHT_RECORDER

_NUM_COLLECTIVES = "2000"
_PREFIX = "rank_"
# Of each pair, the first name is current since torch 2.8, and the second is still supported, with a warning.
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def record_collectives() -> None:
    """Enable torch's record of collectives; call before the process creates its first process group.

    Variables set by the user take precedence.
    """
    _set(_SIZE, _NUM_COLLECTIVES)
    _set(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")


def dump_into(run_dir: Path, device: torch.device) -> None:
    """Make NCCL write its record to the run directory if NCCL ends the process before a watchdog does.

    NCCL reads the path only when it writes, so this can be called after the ranks have agreed on the run directory. A
    path set by the user in the environment takes precedence.

    Args:
        run_dir: the run directory.
        device: device of this rank; no effect on a CPU, which does not use NCCL.
    """
    if device.type == "cuda" and not any(name in os.environ for name in _FILE):
        make_folder(run_dir / FLIGHT_RECORDER)
        _set(_FILE, str(run_dir / FLIGHT_RECORDER / _PREFIX))


def dump_collectives(run_dir: Path, rank: int, device: torch.device) -> None:
    """Write the latest collectives of this process to the run directory, replacing an earlier dump of the same rank.

    Args:
        run_dir: the run directory.
        rank: rank of this process.
        device: device of this rank.
    """
    dump = getattr(c10d, "_dump_nccl_trace" if device.type == "cuda" else "_dump_fr_trace", None)
    if dump is None:
        return
    folder = make_folder(run_dir / FLIGHT_RECORDER)
    with open_regular(folder / f"{_PREFIX}{rank}", "wb") as file:
        file.write(dump())


def _set(names: tuple[str, ...], value: str) -> None:
    """Set the first of several equivalent environment variables, unless one of them is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value
