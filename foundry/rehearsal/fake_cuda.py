"""Stand-in for torch.cuda, and for the few torch functions that would not keep fake tensors fake."""

import copyreg
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch._dynamo  # before torch.cuda is replaced, since its import looks for a real device
import torch._inductor.utils
import torch.distributed.fsdp
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param

from foundry.rehearsal.attention import attention_on_cuda
from foundry.rehearsal.device_dispatch import DeviceDispatch
from foundry.rehearsal.machine import Gpu
from foundry.rehearsal.norms import norms_on_cuda


class _Stream:
    """Stream that executes everything in order. Each rehearsal makes a subclass as its torch.cuda.Stream."""

    dispatch: ClassVar[DeviceDispatch]

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_event(self, event: "_Event") -> None:
        pass

    def wait_stream(self, stream: "_Stream") -> None:
        pass

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        result: _Event = torch.cuda.Event() if event is None else event  # type: ignore[no-untyped-call, assignment]
        return result

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.dispatch.wait("Stream.synchronize")


class _Event:
    """Event that has always completed. Each rehearsal makes a subclass as its torch.cuda.Event."""

    dispatch: ClassVar[DeviceDispatch]

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: _Stream | None = None) -> None:
        pass

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        self.dispatch.wait("Event.elapsed_time")
        return 0.0

    def synchronize(self) -> None:
        self.dispatch.wait("Event.synchronize")


class _FakeCuda:
    """Functions of torch.cuda under their original names, for a machine with `count` GPUs of one kind."""

    def __init__(self, gpu: Gpu, count: int, dispatch: DeviceDispatch) -> None:
        self._gpu, self._count, self._dispatch, self._device = gpu, count, dispatch, 0
        # Stream and Event are classes, not functions, since other libraries use them in annotations.
        self.Stream = type("Stream", (_Stream,), {"dispatch": dispatch})
        self.Event = type("Event", (_Event,), {"dispatch": dispatch})
        self._stream: _Stream = self.Stream(torch.device("cuda", 0))
        self._rng = torch.zeros(16, dtype=torch.uint8)

    def functions(self) -> dict[str, Any]:
        """Return the functions and classes of this stand-in that also exist in torch.cuda."""
        attributes = {
            name: getattr(self, name) for name in dir(self) if not name.startswith("__") and name != "functions"
        }
        return {name: value for name, value in attributes.items() if callable(value) and hasattr(torch.cuda, name)}

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_compiled(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return self._device

    def set_device(self, device: Any) -> None:
        pass  # a rehearsal runs as rank 0, which uses the first device

    def get_device_name(self, device: Any = None) -> str:
        return self._gpu.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self._gpu.capability

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self._gpu.capability >= (8, 0)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self._gpu.memory_bytes - self._dispatch.ledger.live, self._gpu.memory_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return self._dispatch.ledger.live

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._dispatch.ledger.peak_since_reset

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._dispatch.ledger.reset_peak()

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        pass  # statistics of retries and similar events, which do not occur

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        live, peak = self.memory_allocated(), self.max_memory_allocated()
        kinds = {"allocated_bytes": (live, peak), "reserved_bytes": (live, peak), "active_bytes": (live, peak)}
        stats = {f"{kind}.all.current": current for kind, (current, _) in kinds.items()}
        stats |= {f"{kind}.all.peak": peak_bytes for kind, (_, peak_bytes) in kinds.items()}
        return {**stats, "num_alloc_retries": 0, "num_ooms": 0}

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        self._dispatch.wait("torch.cuda.synchronize")

    def current_stream(self, device: Any = None) -> _Stream:
        return self._stream

    default_stream = current_stream

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[_Stream]:
        yield stream

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_rng_state(self, device: Any = "cuda") -> Tensor:
        return self._rng.clone()

    def set_rng_state(self, state: Tensor, device: Any = "cuda") -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    manual_seed_all = manual_seed

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self._dispatch.forbids_waits = mode in ("error", 2)


@contextmanager
def fake_cuda(gpu: Gpu, count: int, dispatch: DeviceDispatch) -> Iterator[None]:
    """Replace torch.cuda by a stand-in with fake GPUs, and record operations on these GPUs in `dispatch`.

    Args:
        gpu: specification of the GPUs.
        count: number of GPUs on this node.
        dispatch: mode that makes tensors on the GPUs fake; entered here.
    """
    resize = torch.UntypedStorage.resize_

    def resize_counted(storage: torch.UntypedStorage, size: int) -> Any:
        """Resize a storage and its ledger entry. FSDP2 frees and allocates gathered weights without an operation."""
        result = resize(storage, size)
        dispatch.ledger.resize(storage, "gathered")
        return result

    attend = attention_on_cuda(nn.functional.scaled_dot_product_attention, lambda query: dispatch.attend("math", query))
    lifts_on_cpu = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.multiple(torch.cuda, **_FakeCuda(gpu, count, dispatch).functions()))
        for name in ("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"):
            enter(mock.patch.object(torch._C, name, _first_device, create=True))
        enter(mock.patch.object(torch._C, "_cuda_setDevice", _do_nothing, create=True))
        enter(mock.patch.object(torch.backends.cuda, "is_flash_attention_available", _is_true))
        enter(mock.patch.object(fake_tensor, "init_gpu_context", _do_nothing))
        enter(mock.patch.object(torch.utils, "swap_tensors", swap_tensors))
        enter(mock.patch.object(Tensor, "data", property(_get_data, _set_data), create=True))
        enter(mock.patch.object(torch.UntypedStorage, "resize_", resize_counted))
        enter(mock.patch.object(nn.functional, "scaled_dot_product_attention", attend))
        enter(mock.patch.object(nn.functional, "rms_norm", norms_on_cuda(nn.functional.rms_norm)))
        enter(mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks))
        # torch.tensor(..., device="cuda") becomes a copy from the host, which `dispatch` intercepts.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts_on_cpu)
        enter(dispatch)
        yield


class _Chunks:
    """Chunks of a tensor as FSDP2 makes them, created on access: FSDP2 reads only the first and the rank's own.

    Chunks for ranks without a part of the tensor are empty.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = tensor.shape[dim]
        self._step = -(-self._size // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._step
        if start >= self._size > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._step, self._size - start))


def _is_true() -> bool:
    return True


def _first_device(*_: Any) -> int:
    return 0


def _do_nothing(*_: Any) -> None:
    pass


def swap_tensors(first: Tensor, second: Tensor) -> None:
    """Swap two tensors as `torch.utils.swap_tensors` does, which refuses fake tensors, since they have weak references.

    The weak references belong to the memo of the fake mode, which is keyed by the Python object.
    """
    slots = set(copyreg._slotnames(type(first))) | set(copyreg._slotnames(type(second)))  # type: ignore[attr-defined]
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    for slot in slots:
        values = getattr(first, slot), getattr(second, slot)
        setattr(second, slot, values[0])
        setattr(first, slot, values[1])
    torch._C._swap_tensor_impl(first, second)


def _get_data(tensor: Tensor) -> Tensor:
    data: Tensor = torch._C.TensorBase.data.__get__(tensor)  # type: ignore[attr-defined]
    return data


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """Assign `tensor.data`. Unlike torch's setter, converts a real tensor with fake data to a fake tensor."""
    if isinstance(data, FakeTensor) and not isinstance(tensor, FakeTensor):
        is_parameter = isinstance(tensor, nn.Parameter)
        other = nn.Parameter(data, requires_grad=tensor.requires_grad) if is_parameter else data.detach()
        swap_tensors(tensor, other)
    else:
        torch._C.TensorBase.data.__set__(tensor, data)  # type: ignore[attr-defined]
