"""The state of optimizers under the names of their parameters, and room for it before an optimizer's first step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError

PREFIX = "optimizer."


@dataclass(frozen=True)
class ParameterState:
    """What one optimizer keeps for one parameter.

    Attributes:
        name: the parameter's.
        parameter: itself.
        optimizer: which updates it.
        state: by key; shared with the optimizer or to become its own.
    """

    name: str
    parameter: nn.Parameter
    optimizer: Optimizer
    state: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by their name in a checkpoint."""
        named = {f"{PREFIX}{self.name}.{key}": value for key, value in self.state.items()}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def collect_state(inner: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The tensors of all state, by their name in a checkpoint.

    Raises:
        CheckpointError: state that another layout could not read.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter, optimizer, _ in _optimized(inner, optimizers):
        held = ParameterState(name, parameter, optimizer, optimizer.state.get(parameter, {}))
        _check(held)
        tensors |= held.tensors()
    return tensors


def allocate_state(
    inner: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, torch.Size]
) -> list[ParameterState]:
    """State for every parameter that has some in a checkpoint, with the layout of this run and values to be read.

    What an optimizer keeps, of which type and on which device, is seen from a step of its own on a small parameter.

    Args:
        inner: the model itself.
        optimizers: over its parameters; they stay as they are.
        saved: shapes of the checkpoint's tensors by name.

    Raises:
        CheckpointError: the checkpoint's state is another optimizer's.
    """
    keys: dict[str, set[str]] = defaultdict(set)
    for saved_name in saved:
        if saved_name.startswith(PREFIX):
            parameter_name, _, key = saved_name.removeprefix(PREFIX).rpartition(".")
            keys[parameter_name].add(key)
    seen: dict[tuple[object, ...], dict[str, Any]] = {}
    allocated: list[ParameterState] = []
    for name, parameter, optimizer, group in _optimized(inner, optimizers):
        # Without a gradient a parameter has no state; if no parameter has any, it was not saved.
        if not keys[name] and any(keys.values()):
            continue
        kind = (id(group), parameter.ndim, parameter.dtype, parameter.device)
        if kind not in seen:
            seen[kind] = _after_one_step(optimizer, group, parameter)
        wanted = {key for key, value in seen[kind].items() if isinstance(value, Tensor)}
        if keys[name] != wanted:
            raise CheckpointError(
                f"of {name} the checkpoint has the optimizer state {_listed(keys[name])}, but "
                f"{type(optimizer).__name__} keeps {_listed(wanted)}: continue with the optimizer it was trained with"
            )
        state = {
            key: _empty_like(value, parameter, saved.get(f"{PREFIX}{name}.{key}")) for key, value in seen[kind].items()
        }
        allocated.append(ParameterState(name, parameter, optimizer, state))
    return allocated


def _optimized(
    inner: nn.Module, optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, nn.Parameter, Optimizer, dict[str, Any]]]:
    """Name, parameter, optimizer and group of everything that is optimized."""
    names = {parameter: name for name, parameter in inner.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter], parameter, optimizer, group


def _check(held: ParameterState) -> None:
    sharded = isinstance(held.parameter, DTensor)
    for key, value in held.state.items():
        name = f"{PREFIX}{held.name}.{key}"
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} is a {type(value).__name__}; only tensors of an optimizer's state are saved")
        fits = isinstance(value, DTensor) and value.shape == held.parameter.shape
        if sharded and value.numel() > 1 and not fits:
            raise CheckpointError(
                f"{name} has the shape {tuple(value.shape)} beside a sharded parameter of "
                f"{tuple(held.parameter.shape)}: no other layout could read it; use ddp or another optimizer"
            )


def _after_one_step(optimizer: Optimizer, group: Mapping[str, Any], like: nn.Parameter) -> dict[str, Any]:
    """The state that the optimizer makes for a parameter of a few numbers."""
    probe = object.__new__(type(optimizer))
    probe.__dict__ |= optimizer.__dict__
    tiny = nn.Parameter(torch.zeros(_tiny_shape(like), dtype=like.dtype, device=like.device))
    tiny.grad = torch.zeros_like(tiny)
    probe.param_groups, probe.state = [{**group, "params": [tiny]}], defaultdict(dict)
    probe.step()
    return dict(probe.state[tiny])


def _tiny_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(range(2, 2 + parameter.ndim))


def _empty_like(value: Any, parameter: nn.Parameter, saved_shape: torch.Size | None) -> Any:
    """A tensor of `value`'s type, laid out as the parameter where it is shaped as one; anything else is kept."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == _tiny_shape(parameter):
        return torch.zeros_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
    return torch.zeros(saved_shape or value.shape, dtype=value.dtype, device=value.device)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
