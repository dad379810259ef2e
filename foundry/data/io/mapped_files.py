"""Datasets of memory-mapped files, which worker processes map themselves instead of being sent their content."""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class _MappedFile:
    """Where a mapped array lies."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]

    def open(self) -> NDArray[Any]:
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


class MapsFiles:
    """Whose arrays that are whole memory-mapped files are pickled as their paths; a part of one is copied."""

    def __getstate__(self) -> dict[str, Any]:
        """Each such array as its file."""
        return {name: _whole_file(value) or value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the files."""
        for name, value in state.items():
            setattr(self, name, value.open() if isinstance(value, _MappedFile) else value)


def _whole_file(value: object) -> _MappedFile | None:
    """The file of an array that holds all of it, in its order."""
    if not isinstance(value, np.memmap):
        return None
    held_by: object = value.base
    if not isinstance(held_by, mmap.mmap) or value.filename is None:
        return None
    return _MappedFile(Path(value.filename), value.dtype, value.offset, value.shape)
