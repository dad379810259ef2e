"""As a module of `python -m`: the command `foundry` with the folder of the variable DISK mounted at that of PLACE.

The ranks wait less for files of other nodes: no network file system delays them here.
"""

import ctypes
import os
import runpy

from foundry.engine import directory

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS of linux/sched.h; Python 3.12 has os.unshare
_BIND, _PRIVATE_RECURSIVE = 0x1000, 0x44000  # of linux/mount.h


def _mount(disk, place):
    """Mount a folder at another path, for this process and its children only."""
    c = ctypes.CDLL(None, use_errno=True)
    for call in (
        lambda: c.unshare(_NEW_MOUNTS),
        lambda: c.mount(b"none", b"/", None, _PRIVATE_RECURSIVE, None),
        lambda: c.mount(disk.encode(), place.encode(), None, _BIND, None),
    ):
        if call() != 0:
            raise OSError(number := ctypes.get_errno(), os.strerror(number))


if __name__ == "__main__":
    _mount(os.environ["DISK"], os.environ["PLACE"])
    directory._PATIENCE_SECONDS = directory._LONG_PATIENCE_SECONDS = 0.3
    runpy.run_module("foundry", run_name="__main__", alter_sys=True)
