"""Pickling of datasets with memory-mapped arrays: worker processes map the files instead of receiving their content."""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class _MappedFile:
    """Location of a memory-mapped array in a file."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]

    def open(self) -> NDArray[Any]:
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


class MapsFiles:
    """Mixin that pickles a memory-mapped array as the path of its file, but a slice of such an array by its values."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with each memory-mapped array replaced by its location in its file."""
        return {name: _mapped_file(value) or value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and map the files."""
        for name, value in state.items():
            setattr(self, name, value.open() if isinstance(value, _MappedFile) else value)


def _mapped_file(value: object) -> _MappedFile | None:
    """Return the location of an array that was mapped directly, or None for slices and other objects."""
    if not isinstance(value, np.memmap):
        return None
    base: object = value.base
    if not isinstance(base, mmap.mmap) or value.filename is None:
        return None
    return _MappedFile(Path(value.filename), value.dtype, value.offset, value.shape)
