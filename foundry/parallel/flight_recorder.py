"""Torch's record of the latest collectives, written down when ranks wait for each other too long.

`torchfrtrace FOLDER` compares the ranks' files: it names the collective that some have begun and others have not.
"""

import os
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d

from foundry.run_dir.files import make_folder, open_regular
from foundry.run_dir.names import FLIGHT_RECORDER

_NUM_COLLECTIVES = "2000"
_PREFIX = "rank_"
# Since torch 2.8 the first names are meant; it still knows the second, and warns about them.
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def record_collectives() -> None:
    """Have torch keep the latest collectives of this process; before its first process group is made.

    What the user has set stays in force.
    """
    _set(_SIZE, _NUM_COLLECTIVES)
    _set(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")


def dump_into(run_dir: Path, device: torch.device) -> None:
    """Have NCCL, where it ends the process before a watchdog does, write its record into the run directory.

    It looks for the place only then, so this may be said when all ranks know the run directory.

    Args:
        run_dir: of the run.
        device: of this rank; without a GPU there is no NCCL.
    """
    if device.type == "cuda" and not any(name in os.environ for name in _FILE):
        make_folder(run_dir / FLIGHT_RECORDER)
        _set(_FILE, str(run_dir / FLIGHT_RECORDER / _PREFIX))


def dump_collectives(run_dir: Path, rank: int, device: torch.device) -> None:
    """Write down the latest collectives of this process, in place of what a rank of this number has said before.

    Args:
        run_dir: of the run.
        rank: whose process this is.
        device: of this rank.
    """
    dump = getattr(c10d, "_dump_nccl_trace" if device.type == "cuda" else "_dump_fr_trace", None)
    if dump is None:
        return
    folder = make_folder(run_dir / FLIGHT_RECORDER)
    with open_regular(folder / f"{_PREFIX}{rank}", "wb") as file:
        file.write(dump())


def _set(names: tuple[str, ...], value: str) -> None:
    """Set the first of several variables of one meaning, unless one of them is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value
