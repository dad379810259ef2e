"""The line of foundry, or of a user's own part, that an operation comes from."""

import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOM = f"{Path(__file__).resolve().parent}/"
_LIBRARIES = tuple(
    f"{Path(path).resolve()}/"
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), Path(torch.__file__).parents[1])
)


def call_site() -> str:
    """Return `file:line text` of the innermost frame that is neither a library's nor of the rehearsal.

    Files of foundry are named from their package on. Threads of autograd have no such frame unless they recompute.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{_PACKAGE}/"):
            if not name.startswith(_ROOM):
                return _described(str(Path(name).relative_to(_PACKAGE.parent)), name, frame.f_lineno)
        elif not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return _described(name, name, frame.f_lineno)
        frame = frame.f_back
    return "the backward pass"


def _described(shown: str, name: str, line: int) -> str:
    return f"{shown}:{line} {linecache.getline(name, line).strip()}".strip()
