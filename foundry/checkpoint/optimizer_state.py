"""Optimizer states as tensors named after their parameters, and allocation of states before the first step."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.nested_state import can_be_saved, flatten, saveable, tensor_names, unflatten
from foundry.core.sharded import is_sharded, reduced_placements, reduced_zeros

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OF_GROUPS = frozenset(("params", "lr_mult", "wd_mult", "initial_lr"))
"""Keys of a parameter group that are settings rather than state, for every optimizer."""
PREFIX, GROUPS, BESIDES = "optimizer.", "optimizer_groups.", "optimizer_besides."


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of one parameter or one parameter group, or state that an optimizer's hooks add.

    Attributes:
        tensors: tensors by their name in a checkpoint.
        node: JSON structure of a nested state; None for a flat state of named tensors.
        accept: assigns the state to the optimizer, after the tensors were read.
    """

    tensors: dict[str, Tensor]
    node: Any = None
    accept: Callable[[], None] = lambda: None


def collect_state(inner: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors of all optimizer states, by their name in a checkpoint.

    Raises:
        CheckpointError: if a state cannot be saved, or could not be read with another sharding.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter, optimizer, _ in _optimized_parameters(inner, optimizers):
        tensors |= _parameter_state(name, parameter, optimizer).tensors
    for _, state in chain(_group_states(inner, optimizers), _other_states(optimizers)):
        tensors |= state.tensors
    return tensors


def describe_state(inner: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the structure of nested optimizer states as JSON for the manifest; empty for most optimizers.

    Raises:
        CheckpointError: as in `collect_state`.
    """
    states: dict[str, Any] = {}
    for name, parameter, optimizer, _ in _optimized_parameters(inner, optimizers):
        if (node := _parameter_state(name, parameter, optimizer).node) is not None:
            states[name] = {"optimizer": type(optimizer).__name__, "state": node}
    groups = [{"parameters": names, "state": state.node} for names, state in _group_states(inner, optimizers)]
    others = [{"optimizer": number, "state": state.node} for number, state in _other_states(optimizers)]
    text = (("states", states), ("groups", groups), ("besides", others))
    return {name: value for name, value in text if value}


def allocate_state(
    inner: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, torch.Size],
    description: Mapping[str, Any],
) -> list[ParameterState]:
    """Allocate optimizer states for all parameters that have a state in a checkpoint, sharded as in this run.

    The dtypes and devices of a flat state are determined by one step of a copy of the optimizer on a tiny parameter. A
    nested state is described by the checkpoint.

    Args:
        inner: the unwrapped model.
        optimizers: optimizers of its parameters; they are not changed.
        saved: shapes of the checkpoint's tensors by name.
        description: the JSON from `describe_state`.

    Returns:
        The states, whose tensors still have to be filled.

    Raises:
        CheckpointError: if the checkpoint has the state of another optimizer.
    """
    states = description.get("states", {})
    nested = set(tensor_names(states))
    keys: dict[str, set[str]] = defaultdict(set)
    for saved_name in saved:
        if saved_name.startswith(PREFIX) and saved_name not in nested:
            parameter_name, _, key = saved_name.removeprefix(PREFIX).rpartition(".")
            keys[parameter_name].add(key)
    is_saved = bool(states) or any(keys.values())
    seen: dict[tuple[object, ...], dict[str, Any]] = {}
    allocated: list[ParameterState] = []
    for name, parameter, optimizer, group in _optimized_parameters(inner, optimizers):
        if name in states:
            allocated.append(_allocate_nested(name, parameter, optimizer, saved, states[name]))
            continue
        # A parameter without a gradient has no saved state. But if no parameter has any, states may be missing: go on.
        if not keys[name] and is_saved:
            continue
        kind = (id(group), parameter.ndim, parameter.dtype, parameter.device)
        if kind not in seen:
            seen[kind] = _state_after_one_step(optimizer, group, parameter)
        if not _is_flat(seen[kind]) and not keys[name]:
            continue
        expected = {key for key, value in seen[kind].items() if isinstance(value, Tensor)}
        if keys[name] != expected:
            raise _mismatch(
                name, f"the optimizer state {_list_names(keys[name])}", f"keeps {_list_names(expected)}", optimizer
            )
        state = {
            key: _empty_like(value, parameter, saved.get(f"{PREFIX}{name}.{key}")) for key, value in seen[kind].items()
        }
        allocated.append(
            ParameterState(_with_full_names(name, state), accept=_make_accept(optimizer, parameter, state))
        )
    allocated += [_allocate_groups(inner, optimizers, saved, text) for text in description.get("groups", [])]
    return allocated + [_allocate_other_state(optimizers, saved, text) for text in description.get("besides", [])]


def _parameter_state(name: str, parameter: nn.Parameter, optimizer: Optimizer) -> ParameterState:
    """Return the optimizer state of a parameter in the form of a checkpoint: tensors, and JSON if it is nested."""
    state = optimizer.state.get(parameter, {})
    if _is_flat(state):
        parameter_state = ParameterState(_with_full_names(name, state))
    else:
        node, tensors = flatten(dict(state), f"{PREFIX}{name}.", type(optimizer).__name__)
        parameter_state = ParameterState(tensors, node)
    _check(parameter_state, parameter)
    return parameter_state


def _is_flat(state: Mapping[Any, Any]) -> bool:
    """Return whether a state contains only named tensors that can be saved, as in torch's own optimizers."""
    return all(
        isinstance(key, str)
        and not {".", "/", "#"} & set(key)
        and (value is None or (isinstance(value, Tensor) and can_be_saved(value)))
        for key, value in state.items()
    )


def _with_full_names(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{PREFIX}{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}


def _group_states(inner: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[list[str], ParameterState]]:
    """Yield names of parameters and the state of each parameter group with state, such as the step size of Prodigy.

    Values that are not state are skipped: constructor arguments, default values, DTensors, and unsupported types.
    """
    names = {parameter: name for name, parameter in inner.named_parameters()}
    for optimizer in optimizers:
        constructors = [vars(kind)["__init__"] for kind in type(optimizer).__mro__[:-1] if "__init__" in vars(kind)]
        settings = _OF_GROUPS.union(*(signature(constructor).parameters for constructor in constructors))
        for group in optimizer.param_groups:
            state = {}
            for key in sorted(group.keys() - settings):
                value, default = group[key], optimizer.defaults.get(key)
                if is_sharded(value) or (not isinstance(value, Tensor) and value == default):
                    continue
                state[key] = value
            if state := saveable(state):
                members = [names[parameter] for parameter in group["params"]]
                node, tensors = flatten(state, f"{GROUPS}{members[0]}.", type(optimizer).__name__)
                yield members, ParameterState(tensors, node)


def _other_states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, ParameterState]]:
    """Yield the saveable entries that hooks of an optimizer add to its state dict, with the index of the optimizer.

    Raises:
        CheckpointError: if there are additional entries, but no hook that loads them.
    """
    for number, optimizer in enumerate(optimizers):
        other_state = {
            key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")
        }
        if not other_state:
            continue
        if not optimizer._optimizer_load_state_dict_pre_hooks:
            raise CheckpointError(
                f"{type(optimizer).__name__} adds {_list_names(other_state)} to its state dict, but has no hook that "
                "loads it (register_load_state_dict_pre_hook); choose another optimizer, or checkpoint=none"
            )
        node, tensors = flatten(saveable(other_state), f"{BESIDES}{number}.", type(optimizer).__name__)
        yield number, ParameterState(tensors, node)


def _allocate_other_state(
    optimizers: Sequence[Optimizer], saved: Mapping[str, torch.Size], text: Mapping[str, Any]
) -> ParameterState:
    if text["optimizer"] >= len(optimizers):
        raise CheckpointError(f"the checkpoint has the state of more optimizers than the {len(optimizers)} of this run")
    optimizer = optimizers[text["optimizer"]]
    device = optimizer.param_groups[0]["params"][0].device
    state, tensors = _allocate_on(device, saved, text["state"])

    def accept() -> None:
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            hook(optimizer, {"state": {}, "param_groups": [], **state})

    return ParameterState(tensors, accept=accept)


def _allocate_nested(
    name: str,
    parameter: nn.Parameter,
    optimizer: Optimizer,
    saved: Mapping[str, torch.Size],
    text: Mapping[str, Any],
) -> ParameterState:
    if text.get("optimizer") != type(optimizer).__name__:
        raise _mismatch(name, f"the state of {text.get('optimizer')}", "is configured", optimizer)

    def allocate(tensor: str, dtype: torch.dtype, on_cpu: bool) -> Tensor:
        if saved[tensor] == parameter.shape:
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
        if saved[tensor].numel() > 1 and is_sharded(parameter) and _is_reduced(saved[tensor], parameter.shape):
            return reduced_zeros(parameter, saved[tensor], dtype)
        return torch.zeros(saved[tensor], dtype=dtype, device="cpu" if on_cpu else parameter.device)

    state, tensors = unflatten(text.get("state"), allocate)
    return ParameterState(tensors, accept=_make_accept(optimizer, parameter, state))


def _allocate_groups(
    inner: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, torch.Size], text: Mapping[str, Any]
) -> ParameterState:
    """Allocate a saved group's state for the groups of this run whose first parameter was in the saved group."""
    names = {name: parameter for name, parameter in inner.named_parameters() if name in text["parameters"]}
    groups = [
        (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(parameter is group["params"][0] for parameter in names.values())
    ]
    device = groups[0][1]["params"][0].device if groups else torch.device("cpu")
    state, tensors = _allocate_on(device, saved, text["state"])

    def accept() -> None:
        for optimizer, group in groups:
            # Keys passed at the creation of the group are settings of this run and stay.
            user_keys = group.keys() - optimizer.defaults.keys()
            group.update({key: deepcopy(value) for key, value in state.items() if key not in user_keys})

    return ParameterState(tensors, accept=accept)


def _allocate_on(device: torch.device, saved: Mapping[str, torch.Size], node: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a nested state and its tensors by name, allocated on a device except for those saved from the CPU."""
    return unflatten(
        node, lambda name, dtype, on_cpu: torch.zeros(saved[name], dtype=dtype, device="cpu" if on_cpu else device)
    )


def _make_accept(optimizer: Optimizer, parameter: nn.Parameter, state: Any) -> Callable[[], None]:
    return partial(optimizer.state.__setitem__, parameter, state)


def _mismatch(name: str, recorded: str, actual: str, optimizer: Optimizer) -> CheckpointError:
    return CheckpointError(
        f"for {name} the checkpoint has {recorded}, but {type(optimizer).__name__} {actual}: resume with the optimizer "
        "of the checkpoint"
    )


def _optimized_parameters(
    inner: nn.Module, optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, nn.Parameter, Optimizer, dict[str, Any]]]:
    """Yield name, parameter, optimizer and parameter group of every optimized parameter."""
    names = {parameter: name for name, parameter in inner.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter], parameter, optimizer, group


def _check(state: ParameterState, parameter: nn.Parameter) -> None:
    """Raise `CheckpointError` for state tensors that could only be read with the current sharding."""
    if not is_sharded(parameter):
        return
    for name, value in state.tensors.items():
        if value.numel() > 1 and not (is_sharded(value) and _follows_sharding(value, parameter)):
            raise CheckpointError(
                f"{name} has the shape {tuple(value.shape)} for a sharded parameter of {tuple(parameter.shape)}: no "
                "other layout could read it; use distributed=ddp or another optimizer"
            )


def _follows_sharding(value: "DTensor", parameter: "DTensor") -> bool:
    """Return whether a state is sharded like its parameter, or like that parameter reduced to size 1 along dimensions.

    Both can be allocated for any sharding of the parameter.
    """
    if value.shape == parameter.shape:
        return True
    return _is_reduced(value.shape, parameter.shape) and value.placements == reduced_placements(parameter, value.shape)


def _is_reduced(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether `shape` has the size of `whole` or 1 in each dimension."""
    return len(shape) == len(whole) and all(size in (1, own) for size, own in zip(shape, whole, strict=True))


def _state_after_one_step(optimizer: Optimizer, group: Mapping[str, Any], like: nn.Parameter) -> dict[str, Any]:
    """Return the state that the optimizer creates for a tiny parameter after one step."""
    probe = object.__new__(type(optimizer))
    probe.__dict__ |= optimizer.__dict__
    dummy = nn.Parameter(torch.zeros(_tiny_shape(like), dtype=like.dtype, device=like.device))
    dummy.grad = torch.zeros_like(dummy)
    probe.param_groups, probe.state = [{**group, "params": [dummy]}], defaultdict(dict)
    probe.step()
    return dict(probe.state[dummy])


def _tiny_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(range(2, 2 + parameter.ndim))


def _empty_like(value: Any, parameter: nn.Parameter, saved_shape: torch.Size | None) -> Any:
    """Return zeros of `value`'s dtype, sharded like the parameter if the state has its shape or size 1 in dimensions.

    If `value` is not a tensor, it is returned unchanged.
    """
    if not isinstance(value, Tensor):
        return value
    if value.shape == _tiny_shape(parameter):
        return torch.zeros_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
    if saved_shape is not None and is_sharded(parameter) and _is_reduced(value.shape, _tiny_shape(parameter)):
        return reduced_zeros(parameter, saved_shape, value.dtype)
    return torch.zeros(saved_shape or value.shape, dtype=value.dtype, device=value.device)


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
