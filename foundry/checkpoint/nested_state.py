"""Conversion of nested optimizer states to named tensors and JSON, and back.

A state may consist of dicts, lists, tuples and sets of tensors, numbers and strings.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.shard import DTYPES
from foundry.core.sharded import is_sharded

_DTYPES_BY_NAME = {str(dtype): dtype for dtype in DTYPES}
_COLLECTIONS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


def flatten(value: Any, prefix: str, owner: str) -> tuple[Any, dict[str, Tensor]]:
    """Split a nested value into JSON and named tensors.

    Args:
        value: a tensor, None, a bool, int, float or str, or dicts, lists, tuples and sets of these.
        prefix: prefix of the tensor names.
        owner: owner of the value, for the error message.

    Returns:
        JSON for `unflatten`, and the tensors by name.

    Raises:
        CheckpointError: if the value contains an unsupported type; the message has its name and type.
    """
    tensors: dict[str, Tensor] = {}

    def encoded(value: Any, path: tuple[str, ...]) -> Any:
        name = f"{prefix}{'/'.join(path)}"
        if isinstance(value, Tensor):
            if not can_be_saved(value):
                raise _unsupported(owner, name, f"a tensor of {value.dtype}, {value.layout}")
            name = f"{name}#{len(tensors)}"  # the number distinguishes the keys 1 and "1"
            tensors[name] = value
            node = {"tensor": name, "dtype": str(value.dtype), "cpu": value.device.type == "cpu"}
            # Keep the memory order, since it affects how matrix products are rounded.
            return node if value.is_contiguous() else node | {"order": _order(value)}
        if type(value) in (dict, OrderedDict):
            if invalid := [key for key in value if type(key) not in (str, int)]:
                raise _unsupported(owner, name, f"a dict with a key of type {type(invalid[0]).__name__}")
            return {"dict": [[key, encoded(item, (*path, str(key)))] for key, item in value.items()]}
        if (kind := _COLLECTIONS.get(type(value))) is not None:
            items = value if isinstance(value, (list, tuple)) else sorted(value, key=repr)  # equal order on all ranks
            return {kind: [encoded(item, (*path, str(index))) for index, item in enumerate(items)]}
        if type(value) is float:
            return {"float": value.hex()}  # JSON has no NaN
        if value is None or type(value) in (bool, int, str):
            return {"value": value}
        raise _unsupported(owner, name, f"a value of type {type(value).__name__}")

    return encoded(value, ()), tensors


def unflatten(node: Any, allocate: Callable[[str, torch.dtype, bool], Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Restore a nested value from JSON.

    Args:
        node: the JSON from `flatten`.
        allocate: returns a tensor, given its name, its dtype, and whether the saved tensor was in host memory; the
            values of the tensor are read later.

    Returns:
        The value, and its tensors by name.

    Raises:
        CheckpointError: if the node is not valid output of `flatten`.
    """
    tensors: dict[str, Tensor] = {}

    def decoded(node: Any) -> Any:
        if "tensor" in node:
            name = node["tensor"]
            tensor = allocate(name, _DTYPES_BY_NAME[node["dtype"]], node["cpu"])
            if (order := node.get("order")) is not None and not is_sharded(tensor):
                back = sorted(range(tensor.dim()), key=order.__getitem__)
                tensor = tensor.permute(order).contiguous().permute(back)
            tensors[name] = tensor
            return tensor
        if "dict" in node:
            return {key: decoded(item) for key, item in node["dict"]}
        for make, kind in _COLLECTIONS.items():
            if kind in node:
                return make(decoded(item) for item in node[kind])
        return float.fromhex(node["float"]) if "float" in node else node["value"]

    try:
        return decoded(node), tensors
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the optimizer's state in the manifest cannot be read ({error!r})") from error


def saveable(value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a dict without the entries, at any depth, that `flatten` does not support."""
    state: dict[str, Any] = {}
    for key, item in value.items():
        with suppress(CheckpointError):
            flatten(inner := saveable(item) if type(item) is dict else item, "", "")
            state[key] = inner
    return state


def can_be_saved(tensor: Tensor) -> bool:
    """Return whether a checkpoint file can store a tensor with this dtype and layout."""
    return tensor.dtype in DTYPES and tensor.layout is torch.strided


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions sorted by stride, largest first."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def tensor_names(node: Any) -> Iterator[str]:
    """Yield the names of the tensors in a node from `flatten`."""
    if isinstance(node, Mapping):
        if "tensor" in node:
            yield str(node["tensor"])
        for item in node.values():
            yield from tensor_names(item)
    elif isinstance(node, list):
        for item in node:
            yield from tensor_names(item)


def _unsupported(owner: str, name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{owner} keeps {name} as {kind}, which a checkpoint cannot store (it stores tensors, numbers, text, dicts "
        "and lists of these); choose another optimizer, or checkpoint=none"
    )
