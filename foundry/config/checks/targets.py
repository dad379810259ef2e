"""Checks of user-defined parts: their `_target_` exists and accepts their arguments."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from foundry.config.build import field_of
from foundry.config.checks.static_source import NotThere, Parameters, resolve_parameters
from foundry.config.diagnostics.names import settings
from foundry.config.metrics import HELD_OUT
from foundry.config.record.recorded import own_targets
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.root import Config
from foundry.config.schemas.tracking import Tracking
from foundry.core.errors import Violation, counted, nearest

GIVEN_BY_THE_RUN: Mapping[str, tuple[str, ...]] = {
    item.name: item.metadata["given"] for item in fields(Config) if item.metadata["given"] is not None
}
"""Names of the arguments, by group, that the run passes to a part in addition to its settings."""

_OFFERED = {item.name: item.metadata["offered"] for item in fields(Config)}

_NAMED_PARTS = {
    "evaluation.evaluators": (Evaluation.offered, ("metrics",)),
    "evaluation.stop_rules": (Evaluation.offered, ("metrics",)),
    "tracking.trackers": (Tracking.offered, ()),
}
"""Groups of named parts: arguments that the run passes if a part accepts them, and keys that it does not receive."""

_FOR_HYDRA = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")


@cache
def runtime_settings(group: str) -> tuple[str, ...]:
    """Return the settings of a group that a part need not accept.

    The run itself reads them, or a preset sets them for all parts.
    """
    found = (path for path, metadata in settings() if metadata.get("runtime") and path.startswith(f"{group}."))
    return tuple(dict.fromkeys(path.removeprefix(f"{group}.") for path in found))


def check_targets(config: Config) -> Iterator[Violation]:
    """Check the `_target_` and the arguments of all user-defined parts."""
    for group, given in GIVEN_BY_THE_RUN.items():
        node = getattr(config, group)
        target = field_of(node, "_target_")
        if (method := next((own for own in own_targets(group) if own.rpartition(".")[0] == target), None)) is not None:
            yield Violation(f"{group}._target_", f"is {target}, which does not take these settings; write {method}")
            continue
        if is_dataclass(node) and not isinstance(node, type):
            if getattr(node, "_target_", None) != getattr(type(node), "_target_", None):
                settings = {item.name: getattr(node, item.name) for item in fields(node)}
                yield from _check(settings, group, given, runtime_settings(group))
        elif isinstance(node, dict) and "_target_" in node:
            yield from _check(node, group, given, runtime_settings(group))
    for path, (_, optional) in _NAMED_PARTS.items():
        group, _, field = path.partition(".")
        for name, node in getattr(getattr(config, group), field).items():
            if isinstance(node, dict) and (node.get("_target_", HELD_OUT) != HELD_OUT or len(node) > 1):
                yield from _check(node, f"{path}.{name}", (), optional)


def _offered(key: str) -> tuple[str, ...]:
    """Return the arguments that the run passes to a part if it accepts them."""
    named = _NAMED_PARTS.get(key.rpartition(".")[0])
    return _OFFERED.get(key, ()) if named is None else named[0]


def _check(node: Mapping[str, Any], key: str, given: tuple[str, ...], optional: tuple[str, ...]) -> Iterator[Violation]:
    target, own = node["_target_"], [name for name in node if name not in _FOR_HYDRA]
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        yield Violation(f"{key}._target_", f"is {target} but must be the dotted path of a class or function")
        return
    try:
        takes = resolve_parameters(target)
    except NotThere as error:
        hint = nearest(error.word, error.among)
        yield Violation(f"{key}._target_", f"is {target} but {error}{hint}")
        return
    if takes is not None:
        yield from _check_arguments(node, key, takes, given, optional)
    if node.get("_recursive_", True):
        for name in own:
            yield from _check_inside(node[name], f"{key}.{name}")


def _check_inside(value: Any, key: str) -> Iterator[Violation]:
    """Check nested parts, which Hydra builds before the outer part."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check_inside(item, f"{key}.{index}")
    elif isinstance(value, dict) and "_target_" in value:
        yield from _check(value, key, (), ())
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _check_inside(item, f"{key}.{name}")


def _check_arguments(
    node: Mapping[str, Any], key: str, takes: Parameters, given: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Violation]:
    target, places = node["_target_"], len(node.get("_args_") or ())
    own = [str(name) for name in node if name not in _FOR_HYDRA]
    listed = f"it takes {', '.join(takes.names)}" if takes.names else "it takes no arguments"
    if not takes.takes_any:
        for name in own:
            if name not in takes.names and name not in optional:
                message = f"is not an argument of {target}{nearest(name, takes.names)}; {listed}"
                yield Violation(f"{key}.{name}", message)
        if missing := [name for name in given if name not in takes.names]:
            message = (
                f"is {target}, which has no argument {' or '.join(missing)}, but the run passes {', '.join(given)}"
            )
            yield Violation(f"{key}._target_", f"{message} by name; {listed}")
            return
    if places > takes.by_place:
        yield Violation(
            f"{key}._args_", f"has {counted(places, 'value')} but {target} takes {takes.by_place} by position"
        )
    is_whole = not node.get("_partial_") or key in GIVEN_BY_THE_RUN  # the run calls these parts
    for name in takes.names[places:] if is_whole else ():
        if name in takes.required and name not in (*own, *given, *_offered(key)):
            yield Violation(f"{key}.{name}", f"has no value but {target} needs one; give it as +{key}.{name}=...")
