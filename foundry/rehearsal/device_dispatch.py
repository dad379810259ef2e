"""Dispatch mode of a rehearsal: CUDA tensors are fake, CPU tensors are real, and operations are recorded."""

import threading
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from foundry.rehearsal.attention import KERNELS
from foundry.rehearsal.call_site import call_site
from foundry.rehearsal.memory_ledger import MemoryLedger
from foundry.rehearsal.record import Attention, Collective, HostWait, LargeTensor

aten = torch.ops.aten

TO_DEVICE, TO_HOST = "blocking copy to the device", "blocking copy to the host"

_NUM_LARGEST = 10

_NUM_READ_TOGETHER = 1024

_COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::barrier": "barrier",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
}
"""Kind of collective for each operation. Other operations in these namespaces only wait or wrap."""

_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
}
"""Operations on the device whose result, or the shape of the result, the host has to read."""


_WITHOUT_FAKE_KERNEL = {aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr}
"""Operations that change tensors in place, return nothing, and have no kernel for fake tensors."""


class WaitError(RuntimeError):
    """Raised if the host would wait for the device although waits are forbidden."""


class DeviceDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that makes CUDA tensors fake and keeps CPU tensors real, so that data, counts, seeds and files are real.

    Values on the device do not exist. If the host reads a number, it gets 1 for a float, 0 for an integer, and False
    for a boolean, except that comparisons with a lower bound (`count > 0`) and of whole tensors (`equal`) are True.

    Attributes:
        ledger: memory of the device.
        phase: current phase of the run.
        forbids_waits: raise `WaitError` instead of counting a wait.
        flops: floating-point operations by phase.
        largest: the largest tensors that differ in shape, dtype or source line, largest first.
    """

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase, self.forbids_waits = "starting", False
        self.ledger = MemoryLedger(self.phase, "held")
        self.flops = Counter[str]()
        self._ranks_per_node = ranks_per_node
        self._waits = Counter[tuple[str, str, str]]()
        self._attention = Counter[tuple[str, str, tuple[int, ...]]]()
        self._collectives = defaultdict[tuple[str, str, str, int, int], list[int]](lambda: [0, 0])
        self._groups: dict[str, tuple[int, int]] = {}
        self.largest: list[LargeTensor] = []
        self._lock = threading.Lock()

    def begin(self, phase: str) -> None:
        """Enter a phase of the run. From then on, new storages count as activations."""
        self.phase, self.ledger.part = phase, "activations"
        self.ledger.begin(phase)

    def wait(self, operation: str) -> None:
        """Record that the host waits for the device.

        Raises:
            WaitError: if waits are forbidden.
        """
        line = call_site()
        if self.forbids_waits:
            raise WaitError(f"called a synchronizing CUDA operation: {operation} at {line}")
        self._waits[self.phase, operation, line] += 1

    def attend(self, kernel: str, query: Tensor) -> None:
        """Record a call of an attention kernel."""
        self._attention[self.phase, kernel, tuple(query.shape)] += 1

    @property
    def waits(self) -> list[HostWait]:
        """Recorded host waits."""
        return [HostWait(phase=p, operation=o, where=w, count=n) for (p, o, w), n in self._waits.items()]

    @property
    def attention(self) -> list[Attention]:
        """Recorded calls of attention kernels."""
        return [Attention(phase=p, kernel=k, query=q, count=n) for (p, k, q), n in self._attention.items()]

    @property
    def collectives(self) -> list[Collective]:
        """Recorded collectives."""
        names = ("phase", "kind", "device", "group_size", "num_nodes")
        return [
            Collective(**dict[str, Any](zip(names, key, strict=True)), count=count, bytes=num_bytes)
            for key, (count, num_bytes) in self._collectives.items()
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch's C++ queries this for every tensor that it passes to Python
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor is first converted to operations on local tensors
        if func is aten.is_pinned.default:
            return _is_pinned(args[0])
        leaves = tree_leaves((args, kwargs))
        if self._is_elsewhere(leaves):
            return func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(func, args, kwargs, leaves)
        on_device = any(isinstance(x, FakeTensor) for x in leaves)
        if not on_device and not any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves):
            return _on_host(func, args, kwargs)
        if func in _WITHOUT_FAKE_KERNEL:
            return None
        if on_device and func in _READS:
            return self._read(func, args[0])
        if on_device and func is aten.index.Tensor:
            args = args[0], [self._selected(index) for index in args[1]]
            leaves = tree_leaves(args)
        if func is aten._to_copy.default and (copied := self._copied_to_host(args[0], kwargs)) is not None:
            return copied
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            if not (_is_non_blocking(args, kwargs) and _is_pinned(args[0])):
                self.wait(TO_HOST)
            return args[0]
        if func in (aten._to_copy.default, aten.copy_.default):
            self._note_copy_to_device(func, args, kwargs)
        return self._compute(func, args, kwargs, leaves)

    def _is_elsewhere(self, leaves: list[Any]) -> bool:
        """Return True if an operation is on fake tensors of another mode, as for the plan and DTensor's shape rules."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return True
        return any(isinstance(x, FakeTensor) and x.fake_mode is not self.fake for x in leaves)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Run an operation of the device, on shapes and dtypes only."""
        if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in leaves):
            args, kwargs = self._faked(args, kwargs)
        with self.fake:
            result = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops[self.phase] += count(*args, **kwargs, out_val=result)
        if name in KERNELS:
            self.attend(KERNELS[name], args[0])
        for value in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(value, FakeTensor) and value.fake_device.type == "cuda":
                self._enter(value, name)
        if func is aten.gt.Scalar:
            result.is_likely = True
        return result

    def _enter(self, tensor: FakeTensor, operation: str) -> None:
        size = self.ledger.enter(tensor)
        if size and (len(self.largest) < _NUM_LARGEST or size > self.largest[-1].bytes):
            entry = LargeTensor(
                phase=self.phase,
                operation=operation,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=size,
                where=call_site(),
            )
            key = entry.shape, entry.dtype, entry.where
            with self._lock:  # a backward pass may run in another thread
                if all((other.shape, other.dtype, other.where) != key for other in self.largest):
                    insort(self.largest, entry, key=lambda tensor: -tensor.bytes)
                    del self.largest[_NUM_LARGEST:]

    def _read(self, func: Any, tensor: FakeTensor) -> Any:
        """Return a substitute for device values that the host reads; see the class."""
        self.wait(func.name())
        if func is aten.equal.default:
            return True
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default):
            if tensor.dtype is torch.bool:
                return getattr(tensor, "is_likely", False)
            return 1.0 if tensor.dtype.is_floating_point else 0
        if func is aten.nonzero.default:
            with self.fake:
                return torch.empty(0, tensor.ndim, dtype=torch.int64, device=tensor.device)
        raise NotImplementedError(f"{func.name()} at {call_site()} has a result whose shape depends on values")

    def _selected(self, index: Tensor | None) -> Tensor | None:
        """Return an index; for a boolean mask, indices of all its elements, whose number the host waits for."""
        if index is None or index.dtype is not torch.bool:
            return index
        self.wait("aten::nonzero")
        with self.fake:
            return torch.empty(index.numel(), dtype=torch.int64, device=index.device)

    def _copied_to_host(self, tensor: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return a CPU tensor for a copy from the device to the host; None for any other copy.

        A small floating-point tensor, such as sums and counts of metrics, is filled with 1, as in `_read`; every other
        tensor with 0.
        """
        device = kwargs.get("device")
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda" or device is None:
            return None
        if device.type != "cpu":
            return None
        if not kwargs.get("non_blocking"):
            self.wait(TO_HOST)
        dtype = kwargs.get("dtype") or tensor.dtype
        if dtype.is_floating_point and tensor.numel() <= _NUM_READ_TOGETHER:
            return torch.ones(tensor.shape, dtype=dtype)
        return torch.zeros(tensor.shape, dtype=dtype)

    def _note_copy_to_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = args[0] if func is aten._to_copy.default else args[1]
        if isinstance(source, FakeTensor) or not isinstance(source, Tensor) or source.numel() == 0:
            return
        if not _is_non_blocking(args, kwargs):
            self.wait(TO_DEVICE)

    def _faked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with fake tensors in place of real CPU tensors."""

        def fake(value: Tensor) -> Tensor:
            if isinstance(value, FakeTensor):
                return value
            with self.fake:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")

        converted: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, fake, (args, kwargs))
        return converted

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        on_device = any(isinstance(x, FakeTensor) for x in tensors)
        if on_device and not all(isinstance(x, FakeTensor) for x in tensors):
            raise RuntimeError(f"{func.name()} at {call_site()} has tensors on the host and on the device")
        name = func.name().partition(".")[0]
        if (kind := _COLLECTIVES.get(name)) is not None:
            size, num_nodes = self._group_of(leaves)
            totals = self._collectives[self.phase, kind, "cuda" if on_device else "cpu", size, num_nodes]
            totals[0] += 1
            totals[1] += max((x.numel() * x.element_size() for x in tensors), default=0)
        if not on_device:
            return func(*args, **kwargs)
        with self.fake:
            result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, FakeTensor):
                self._enter(value, name)
        if kind == "all_gather":
            self.ledger.assign(args[0], "gathered")
        elif kind == "reduce_scatter" and name == "c10d::_reduce_scatter_base_":
            self.ledger.assign(args[0], "gradients")
            self.ledger.assign(args[1], "reducing")
        return result

    def _group_of(self, leaves: list[Any]) -> tuple[int, int]:
        """Return the number of ranks and of nodes of a collective's process group; 1 and 1 if it has no group."""
        for value in leaves:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                group = dist.ProcessGroup.unbox(value)
                break
            if isinstance(value, str) and value in self._groups:
                return self._groups[value]
            if isinstance(value, str) and (group := _group_named(value)) is not None:
                break
        else:
            return 1, 1
        if group.group_name not in self._groups:
            nodes = {rank // self._ranks_per_node for rank in dist.get_process_group_ranks(group)}
            self._groups[group.group_name] = group.size(), len(nodes)
        return self._groups[group.group_name]


def _group_named(name: str) -> Any:
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except (RuntimeError, ValueError):  # another string argument, such as the operation "sum"
        return None


def _on_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host. A tensor in pinned memory is an ordinary tensor with `is_pinned_in_rehearsal`."""
    if func is aten._pin_memory.default:
        copy = args[0].clone()
        copy.is_pinned_in_rehearsal = True
        return copy
    if kwargs.get("pin_memory"):
        result = func(*args, **{**kwargs, "pin_memory": False})
        result.is_pinned_in_rehearsal = True
        return result
    return func(*args, **kwargs)


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "is_pinned_in_rehearsal", False)


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
