"""Validation and construction of Optuna's samplers and pruners.

Only classes of Optuna are allowed, because a search passes its pruner to its jobs in a file.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from foundry.config.build import HYDRA_KEYS
from foundry.core.errors import Violation, as_text, nearest

_CLASS = re.compile(r"[A-Z]\w*")


def check_part(kind: str, node: Mapping[str, Any], key: str) -> Iterator[Violation]:
    """Check that a node has a class of `optuna.samplers` or `optuna.pruners`, depending on `kind`, and arguments only.

    Args:
        kind: "sampler" or "pruner".
        node: `_target_` and arguments, which can contain nested nodes of the same kind, as in PatientPruner.
        key: key of the setting, for messages.
    """
    if "_target_" not in node:
        example = "{_target_: optuna.samplers.TPESampler, seed: 0}"
        yield Violation(key, f"is {as_text(dict(node))} but needs a _target_, such as {example}")
    else:
        yield from _check(kind, dict(node), key)


def build_part(kind: str, node: Mapping[str, Any]) -> Any:
    """Build a sampler or pruner, after a check with `check_part`.

    Raises:
        ValueError: `check_part` finds a violation, or Optuna does not have the class.
        TypeError: the arguments do not match the class.
    """
    if messages := [str(violation) for violation in check_part(kind, node, kind)]:
        raise ValueError("; ".join(messages))
    return _build(kind, dict(node))


def _check(kind: str, node: Any, key: str) -> Iterator[Violation]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in children:
        child_key = f"{key}.{as_text(name)}"
        if name == "_target_":
            package, _, class_name = str(value).rpartition(".")
            if package != f"optuna.{kind}s" or not _CLASS.fullmatch(class_name):
                yield Violation(child_key, f"is {as_text(value)} but must be a class of optuna.{kind}s")
        elif name in HYDRA_KEYS:
            yield Violation(
                child_key, f"is {as_text(value)} but a {kind} takes a _target_ and arguments only; remove it"
            )
        else:
            yield from _check(kind, value, child_key)


def _build(kind: str, node: Any) -> Any:
    if isinstance(node, list):
        return [_build(kind, item) for item in node]
    if not isinstance(node, dict):
        return node
    arguments = {str(name): _build(kind, value) for name, value in node.items() if name != "_target_"}
    if "_target_" not in node:
        return arguments
    package = import_module(f"optuna.{kind}s")
    name = str(node["_target_"]).rpartition(".")[2]
    if name not in package.__all__:
        raise ValueError(f"optuna.{kind}s has no {name}{nearest(name, package.__all__)}")
    return getattr(package, name)(**arguments)
