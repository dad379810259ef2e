"""Memory of tensors during operations on fake tensors."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of storages that operations allocate and that are still alive.

    Attributes:
        current: bytes of the live storages that were allocated within the mode.
        peak: largest value of `current`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: int = 0
        self.peak: int = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outside = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        output = operator(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in outside:
                self._add(storage)
        self._note_peak()
        return output

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.current)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def subtract(_: object) -> None:
            del self._alive[key]
            self.current -= size

        self._alive[key] = weakref.ref(storage, subtract)
        self.current += size
