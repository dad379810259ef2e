"""The memory of a device that does not exist: live storages by part, and their peak in each phase of a run."""

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

_BLOCK = 512
"""Torch's allocator rounds each storage up to this many bytes."""


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    size: int
    part: str


@dataclass
class PhasePeak:
    """The most bytes that were live at one time in a phase, and their parts.

    Attributes:
        size: bytes.
        parts: bytes by part; their sum is `size`.
    """

    size: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class MemoryLedger:
    """Counts storages from their allocation until nothing holds them; FSDP2 resizes some of them in between.

    Attributes:
        part: to which new storages belong.
        phase: name of the current phase.
        live: bytes now.
        peak_since_reset: most bytes since `reset_peak`.
        peaks: by phase, in order of time.
    """

    def __init__(self, phase: str, part: str) -> None:
        """Begin with nothing allocated.

        Args:
            phase: name of the first phase.
            part: to which new storages belong.
        """
        self.part, self.live, self.peak_since_reset = part, 0, 0
        self.peaks: dict[str, PhasePeak] = {}
        self._parts: Counter[str] = Counter()
        self._storages: dict[int, _Storage] = {}
        self._lock = threading.RLock()  # a storage may die, and so be taken out, while another is entered
        self.begin(phase)

    def begin(self, phase: str) -> None:
        """Enter a phase; its peak is at least the bytes that are live now."""
        with self._lock:
            self.phase = phase
            self._peak = self.peaks.setdefault(phase, PhasePeak())
            self._note_peak()

    def reset_peak(self) -> None:
        """Have `peak_since_reset` begin anew, as `torch.cuda.reset_peak_memory_stats` does; peaks of phases stay."""
        self.peak_since_reset = self.live

    @property
    def parts(self) -> dict[str, int]:
        """Live bytes by part."""
        return {part: size for part, size in self._parts.items() if size}

    def enter(self, tensor: Tensor) -> int:
        """Count the storage of a tensor unless it is known; return the bytes of a new one, else 0."""
        storage = tensor.untyped_storage()
        with self._lock:
            known = self._storages.get(storage._cdata)
            if known is not None and known.reference() is not None:
                self._resize(known, storage)
                return 0
            if known is not None:  # another thread is about to take it out
                self._move(-known.size, known.part)
            key = storage._cdata
            reference = weakref.ref(storage, lambda reference: self._leave(key, reference))
            entry = self._storages[key] = _Storage(reference, _rounded(storage), self.part)
            self._move(entry.size, entry.part)
            return entry.size

    def resized(self, storage: torch.UntypedStorage, part: str) -> None:
        """Count a storage anew whose size has changed; with memory again, it is of this part."""
        with self._lock:
            known = self._storages.get(storage._cdata)
            if known is not None:
                if storage.nbytes():
                    self._assign(known, part)
                self._resize(known, storage)

    def assign(self, tensor: Tensor, part: str) -> None:
        """Assign a tensor to a part; tensors outside of the device's memory are ignored."""
        with self._lock:
            known = self._storages.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self._assign(known, part)

    def _assign(self, known: _Storage, part: str) -> None:
        self._parts[known.part] -= known.size
        self._parts[part] += known.size
        known.part = part

    def _resize(self, known: _Storage, storage: torch.UntypedStorage) -> None:
        size = _rounded(storage)
        if size != known.size:
            by, known.size = size - known.size, size
            self._move(by, known.part)

    def _leave(self, key: int, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        with self._lock:
            if self._storages[key].reference is reference:
                gone = self._storages.pop(key)
                self._move(-gone.size, gone.part)

    def _move(self, by: int, part: str) -> None:
        self.live += by
        self._parts[part] += by
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_since_reset = max(self.peak_since_reset, self.live)
        if self.live > self._peak.size:
            self._peak.size, self._peak.parts = self.live, self.parts


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _BLOCK) * _BLOCK
