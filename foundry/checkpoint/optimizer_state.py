"""The state of optimizers under the names of their parameters, and room for it before an optimizer's first step."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.nested_state import can_be_saved, flatten, saveable, tensor_names, unflatten
from foundry.core.sharded import is_sharded

_OF_GROUPS = frozenset(("params", "lr_mult", "wd_mult", "initial_lr"))
"""Entries of a group that are settings, whatever its optimizer."""
PREFIX, GROUPS, BESIDES = "optimizer.", "optimizer_groups.", "optimizer_besides."


@dataclass(frozen=True)
class ParameterState:
    """What one optimizer keeps for one parameter, or for one group of parameters.

    Attributes:
        tensors: by their name in a checkpoint.
        node: of state that is not just tensors by name, how the tensors make it up, as JSON; None for other state.
        accept: gives the optimizer the state, once the tensors have been read.
    """

    tensors: dict[str, Tensor]
    node: Any = None
    accept: Callable[[], None] = lambda: None


def collect_state(inner: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The tensors of all state, by their name in a checkpoint.

    Raises:
        CheckpointError: state that cannot be saved, or that another layout could not read.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter, optimizer, _ in _optimized(inner, optimizers):
        tensors |= _held(name, parameter, optimizer).tensors
    for _, held in chain(_held_by_groups(inner, optimizers), _held_besides(optimizers)):
        tensors |= held.tensors
    return tensors


def describe_state(inner: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What the names of tensors do not say of the state, as JSON for the manifest; empty for most optimizers.

    Raises:
        CheckpointError: as `collect_state`.
    """
    states: dict[str, Any] = {}
    for name, parameter, optimizer, _ in _optimized(inner, optimizers):
        if (node := _held(name, parameter, optimizer).node) is not None:
            states[name] = {"optimizer": type(optimizer).__name__, "state": node}
    groups = [{"parameters": names, "state": held.node} for names, held in _held_by_groups(inner, optimizers)]
    besides = [{"optimizer": number, "state": held.node} for number, held in _held_besides(optimizers)]
    text = (("states", states), ("groups", groups), ("besides", besides))
    return {name: value for name, value in text if value}


def allocate_state(
    inner: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, torch.Size],
    described: Mapping[str, Any],
) -> list[ParameterState]:
    """State for every parameter that has some in a checkpoint, with the layout of this run and values to be read.

    What an optimizer keeps, of which type and on which device, is seen from a step of its own on a small parameter,
    or said by the checkpoint where it is more than tensors by name.

    Args:
        inner: the model itself.
        optimizers: over its parameters; they stay as they are.
        saved: shapes of the checkpoint's tensors by name.
        described: from `describe_state`.

    Raises:
        CheckpointError: the checkpoint's state is another optimizer's.
    """
    states = described.get("states", {})
    nested = set(tensor_names(states))
    keys: dict[str, set[str]] = defaultdict(set)
    for saved_name in saved:
        if saved_name.startswith(PREFIX) and saved_name not in nested:
            parameter_name, _, key = saved_name.removeprefix(PREFIX).rpartition(".")
            keys[parameter_name].add(key)
    is_saved = bool(states) or any(keys.values())
    seen: dict[tuple[object, ...], dict[str, Any]] = {}
    allocated: list[ParameterState] = []
    for name, parameter, optimizer, group in _optimized(inner, optimizers):
        if name in states:
            allocated.append(_allocate_nested(name, parameter, optimizer, saved, states[name]))
            continue
        # Without a gradient a parameter has no state; if no parameter has any, it was not saved.
        if not keys[name] and is_saved:
            continue
        kind = (id(group), parameter.ndim, parameter.dtype, parameter.device)
        if kind not in seen:
            seen[kind] = _after_one_step(optimizer, group, parameter)
        if not _is_flat(seen[kind]) and not keys[name]:
            continue
        wanted = {key for key, value in seen[kind].items() if isinstance(value, Tensor)}
        if keys[name] != wanted:
            raise _another(name, f"the optimizer state {_listed(keys[name])}", f"keeps {_listed(wanted)}", optimizer)
        state = {
            key: _empty_like(value, parameter, saved.get(f"{PREFIX}{name}.{key}")) for key, value in seen[kind].items()
        }
        allocated.append(ParameterState(_named(name, state), accept=_accepting(optimizer, parameter, state)))
    allocated += [_allocate_groups(inner, optimizers, saved, text) for text in described.get("groups", [])]
    return allocated + [_allocate_besides(optimizers, saved, text) for text in described.get("besides", [])]


def _held(name: str, parameter: nn.Parameter, optimizer: Optimizer) -> ParameterState:
    """A parameter's state as it is to be saved."""
    state = optimizer.state.get(parameter, {})
    if _is_flat(state):
        held = ParameterState(_named(name, state))
    else:
        node, tensors = flatten(dict(state), f"{PREFIX}{name}.", type(optimizer).__name__)
        held = ParameterState(tensors, node)
    _check(held, parameter)
    return held


def _is_flat(state: Mapping[Any, Any]) -> bool:
    """Whether it is tensors by name and nothing else, as of torch's own optimizers."""
    return all(
        isinstance(key, str)
        and not {".", "/", "#"} & set(key)
        and (value is None or (isinstance(value, Tensor) and can_be_saved(value)))
        for key, value in state.items()
    )


def _named(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{PREFIX}{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}


def _held_by_groups(inner: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[list[str], ParameterState]]:
    """What optimizers count or estimate for a whole group, such as the step size of Prodigy, and its parameters.

    Arguments of a constructor are settings, and not state; so is what cannot be saved.
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


def _held_besides(optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, ParameterState]]:
    """What hooks of an optimizer add to its state dict, as far as it can be saved; the rest are settings.

    Raises:
        CheckpointError: there is something, and no hook that takes it back.
    """
    for number, optimizer in enumerate(optimizers):
        besides = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
        if not besides:
            continue
        if not optimizer._optimizer_load_state_dict_pre_hooks:
            raise CheckpointError(
                f"{type(optimizer).__name__} adds {_listed(besides)} to its state dict, and no hook that reads it back "
                "(register_load_state_dict_pre_hook); choose another optimizer, or checkpoint=none"
            )
        node, tensors = flatten(saveable(besides), f"{BESIDES}{number}.", type(optimizer).__name__)
        yield number, ParameterState(tensors, node)


def _allocate_besides(
    optimizers: Sequence[Optimizer], saved: Mapping[str, torch.Size], text: Mapping[str, Any]
) -> ParameterState:
    if text["optimizer"] >= len(optimizers):
        raise CheckpointError(f"the checkpoint has the state of more than {len(optimizers)} optimizers")
    optimizer = optimizers[text["optimizer"]]
    device = optimizer.param_groups[0]["params"][0].device
    state, tensors = unflatten(
        text["state"],
        lambda name, dtype, on_cpu: torch.zeros(saved[name], dtype=dtype, device="cpu" if on_cpu else device),
    )

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
        raise _another(name, f"the state of {text.get('optimizer')}", "is chosen", optimizer)

    def allocate(tensor: str, dtype: torch.dtype, on_cpu: bool) -> Tensor:
        if saved[tensor] == parameter.shape:
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
        return torch.zeros(saved[tensor], dtype=dtype, device="cpu" if on_cpu else parameter.device)

    state, tensors = unflatten(text.get("state"), allocate)
    return ParameterState(tensors, accept=_accepting(optimizer, parameter, state))


def _allocate_groups(
    inner: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, torch.Size], text: Mapping[str, Any]
) -> ParameterState:
    """State for the groups that have a saved group's parameters; another layout may have split it, or joined some."""
    names = {name: parameter for name, parameter in inner.named_parameters() if name in text["parameters"]}
    own = [
        (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(parameter is group["params"][0] for parameter in names.values())
    ]
    device = own[0][1]["params"][0].device if own else torch.device("cpu")
    state, tensors = unflatten(
        text["state"],
        lambda name, dtype, on_cpu: torch.zeros(saved[name], dtype=dtype, device="cpu" if on_cpu else device),
    )

    def accept() -> None:
        for optimizer, group in own:
            # What the group had been given when it was made is a setting, and this run's.
            given = group.keys() - optimizer.defaults.keys()
            group.update({key: deepcopy(value) for key, value in state.items() if key not in given})

    return ParameterState(tensors, accept=accept)


def _accepting(optimizer: Optimizer, parameter: nn.Parameter, state: Any) -> Callable[[], None]:
    return partial(optimizer.state.__setitem__, parameter, state)


def _another(name: str, has: str, keeps: str, optimizer: Optimizer) -> CheckpointError:
    return CheckpointError(
        f"of {name} the checkpoint has {has}, but {type(optimizer).__name__} {keeps}: continue with the optimizer it "
        "was trained with"
    )


def _optimized(
    inner: nn.Module, optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, nn.Parameter, Optimizer, dict[str, Any]]]:
    """Name, parameter, optimizer and group of everything that is optimized."""
    names = {parameter: name for name, parameter in inner.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter], parameter, optimizer, group


def _check(held: ParameterState, parameter: nn.Parameter) -> None:
    """Refuse what only this layout could read."""
    if not is_sharded(parameter):
        return
    for name, value in held.tensors.items():
        fits = is_sharded(value) and value.shape == parameter.shape
        if value.numel() > 1 and not fits:
            raise CheckpointError(
                f"{name} has the shape {tuple(value.shape)} beside a sharded parameter of {tuple(parameter.shape)}: no "
                "other layout could read it; use ddp or another optimizer"
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
