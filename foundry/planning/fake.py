"""A model that knows its shapes, types and initial spread, and has no numbers.

`FakeTensorMode` runs a model's own constructor without allocating anything, so it works for any model, however large.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class FakeModel:
    """A model made of fake tensors.

    Attributes:
        model: its parameters and buffers have shapes and types on the CPU, and no storage.
        mode: under which it was built, and which makes fakes of other tensors for it.
        initial_std: standard deviation of every parameter's initial values, by its name; 0 for a constant, None where
            it is unknown: weights that are read from files, drawn in parts, or computed in a way not followed here.
    """

    model: nn.Module
    mode: FakeTensorMode
    initial_std: dict[str, float | None]


def build_fake(build: Callable[[], nn.Module]) -> FakeModel:
    """Build a model without allocating its weights; what its constructor raises is passed on.

    Args:
        build: makes the model, as for training.
    """
    # Without a kernel for fake tensors torch would run the real one on zeros, and allocate them.
    mode, spread = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False), _Spread()
    with mode, spread, _truncated_normals_go_to(spread):
        model = build()
    return FakeModel(model, mode, {name: spread.of(parameter) for name, parameter in model.named_parameters()})


class _Spread(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it without types
    """Follows the standard deviation of what every storage holds, through what is written to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # With the storage itself, so that its address is not used again.
        self._known: dict[int, tuple[torch.UntypedStorage, float | None]] = {}

    def of(self, tensor: Tensor) -> float | None:
        """Standard deviation of the values of `tensor`, where it is known."""
        if tensor.numel() == 1:
            return 0.0
        return self._known.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def note(self, tensor: Tensor, std: float | None) -> None:
        """`tensor` now holds values of this standard deviation."""
        storage = tensor.untyped_storage()
        is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        self._known[storage._cdata] = (storage, std if is_whole else None)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        std = self._after(func.overloadpacket.__name__.rstrip("_"), values)
        result = func(*args, **(kwargs or {}))
        targets = [values[name] for name in written if isinstance(values.get(name), Tensor)]
        is_fresh = all(returned.alias_info is None for returned in func._schema.returns)
        for target in targets or ([result] if is_fresh and isinstance(result, Tensor) else []):
            self.note(target, std)
        return result

    def _after(self, operator: str, values: dict[str, Any]) -> float | None:
        """Standard deviation of what an operator draws or computes from its arguments, by the schema's names."""
        if operator in _DRAWS:
            return _DRAWS[operator](values)
        source, other = values.get("src", values.get("self")), values.get("other")
        known = self.of(source) if isinstance(source, Tensor) else None
        if known is None or operator in ("clone", "copy", "_to_copy"):
            return known
        if not isinstance(other, (int, float)):
            return None
        match operator:
            case "add" | "sub":
                return known
            case "mul":
                return known * abs(other)
            case "div":
                return known / abs(other)
        return None


def _constant(values: dict[str, Any]) -> float:
    return 0.0


def _normal(values: dict[str, Any]) -> float:
    return float(values.get("std", 1.0))


def _uniform(values: dict[str, Any]) -> float:
    return float(values.get("to", 1.0) - values.get("from", 0.0)) / math.sqrt(12)


_CONSTANTS = ("fill", "zero", "ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_zeros", "new_ones")
_DRAWS: dict[str, Callable[[dict[str, Any]], float]] = {
    **dict.fromkeys(_CONSTANTS, _constant),
    **dict.fromkeys(("normal", "randn", "randn_like"), _normal),
    **dict.fromkeys(("uniform", "rand", "rand_like"), _uniform),
}


@contextmanager
def _truncated_normals_go_to(spread: _Spread) -> Iterator[None]:
    """Note truncated normals by formula: torch draws again until all values are within, which fakes cannot tell."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name)

    def draw(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        spread.note(tensor, std * _truncated_std((a - mean) / std, (b - mean) / std))
        return tensor

    setattr(nn.init, name, draw)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


def _truncated_std(low: float, high: float) -> float:
    """Standard deviation of a standard normal variable within [low, high] (Johnson, Kotz and Balakrishnan, 1994)."""

    def density(x: float) -> float:
        return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)

    mass = 0.5 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))
    mean = (density(low) - density(high)) / mass
    return math.sqrt(1 + (low * density(low) - high * density(high)) / mass - mean**2)
