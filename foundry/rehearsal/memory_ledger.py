"""Memory accounting for a fake device: live storages by part, and their peak in each phase of a run."""

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

_BLOCK = 512
"""Granularity of torch's allocator, which rounds each storage up to a multiple of this many bytes."""


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    size: int
    part: str


@dataclass
class PhasePeak:
    """Peak of the live memory in a phase.

    Attributes:
        size: bytes.
        parts: bytes by part; their sum is `size`.
    """

    size: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class MemoryLedger:
    """Counter of live storages, from allocation until the last reference is gone, including resizes by FSDP2.

    Attributes:
        part: part that new storages belong to.
        phase: name of the current phase.
        live: current bytes.
        peak_since_reset: peak in bytes since `reset_peak`.
        peaks: peak of each phase, in order of time.
    """

    def __init__(self, phase: str, part: str) -> None:
        """Begin with nothing allocated.

        Args:
            phase: name of the first phase.
            part: part that new storages belong to.
        """
        self.part, self.live, self.peak_since_reset = part, 0, 0
        self.peaks: dict[str, PhasePeak] = {}
        self._parts: Counter[str] = Counter()
        self._storages: dict[int, _Storage] = {}
        self._lock = threading.RLock()  # reentrant: a storage may be freed and removed while another is entered
        self.begin(phase)

    def begin(self, phase: str) -> None:
        """Enter a phase, whose peak is at least the live memory at this time."""
        with self._lock:
            self.phase = phase
            self._peak = self.peaks.setdefault(phase, PhasePeak())
            self._note_peak()

    def reset_peak(self) -> None:
        """Reset `peak_since_reset`, as `torch.cuda.reset_peak_memory_stats` does. Peaks of phases stay."""
        self.peak_since_reset = self.live

    @property
    def parts(self) -> dict[str, int]:
        """Live bytes by part."""
        return {part: size for part, size in self._parts.items() if size}

    def enter(self, tensor: Tensor) -> int:
        """Add the storage of a tensor and return its bytes; if it is in the ledger, update its size and return 0."""
        storage = tensor.untyped_storage()
        with self._lock:
            entry = self._storages.get(storage._cdata)
            if entry is not None and entry.reference() is not None:
                self._resize(entry, storage)
                return 0
            if entry is not None:  # of a freed storage, which another thread is about to remove
                self._add_bytes(-entry.size, entry.part)
            key = storage._cdata
            reference = weakref.ref(storage, lambda reference: self._leave(key, reference))
            entry = self._storages[key] = _Storage(reference, _round_up(storage), self.part)
            self._add_bytes(entry.size, entry.part)
            return entry.size

    def resize(self, storage: torch.UntypedStorage, part: str) -> None:
        """Update the size of a resized storage, and assign it to `part` if its new size is not 0."""
        with self._lock:
            entry = self._storages.get(storage._cdata)
            if entry is not None:
                if storage.nbytes():
                    self._assign(entry, part)
                self._resize(entry, storage)

    def assign(self, tensor: Tensor, part: str) -> None:
        """Assign a tensor's storage to a part. Tensors whose storage is not in the ledger are ignored."""
        with self._lock:
            entry = self._storages.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self._assign(entry, part)

    def _assign(self, entry: _Storage, part: str) -> None:
        self._parts[entry.part] -= entry.size
        self._parts[part] += entry.size
        entry.part = part

    def _resize(self, entry: _Storage, storage: torch.UntypedStorage) -> None:
        size = _round_up(storage)
        if size != entry.size:
            growth, entry.size = size - entry.size, size
            self._add_bytes(growth, entry.part)

    def _leave(self, key: int, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        with self._lock:
            if self._storages[key].reference is reference:
                entry = self._storages.pop(key)
                self._add_bytes(-entry.size, entry.part)

    def _add_bytes(self, num_bytes: int, part: str) -> None:
        self.live += num_bytes
        self._parts[part] += num_bytes
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_since_reset = max(self.peak_since_reset, self.live)
        if self.live > self._peak.size:
            self._peak.size, self._peak.parts = self.live, self.parts


def _round_up(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _BLOCK) * _BLOCK
