"""Source line of an operation, in foundry or in the user's code."""

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
    """Return `file:line text` of the innermost frame outside of libraries and of `foundry.rehearsal`.

    Paths in foundry begin with the package name. Return "the backward pass" if no frame is outside: threads of autograd
    have frames of foundry only while they recompute a block.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{_PACKAGE}/"):
            if not name.startswith(_ROOM):
                return _format_line(str(Path(name).relative_to(_PACKAGE.parent)), name, frame.f_lineno)
        elif not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return _format_line(name, name, frame.f_lineno)
        frame = frame.f_back
    return "the backward pass"


def _format_line(path: str, name: str, line: int) -> str:
    return f"{path}:{line} {linecache.getline(name, line).strip()}".strip()
