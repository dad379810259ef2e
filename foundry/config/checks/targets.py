"""Checks of user-defined parts: their `_target_` exists and accepts their arguments."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry.config.build import field_of
from foundry.config.checks.static_source import NameNotFound, Parameters, resolve_parameters
from foundry.config.diagnostics.names import settings
from foundry.config.metrics import HELD_OUT
from foundry.config.record.recorded import built_in_targets
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.launcher import is_own
from foundry.config.schemas.root import Config
from foundry.config.schemas.tracking import Tracking
from foundry.core.errors import Violation, counted, nearest

RUN_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    item.name: item.metadata["given"] for item in fields(Config) if item.metadata["given"] is not None
}
"""Names of the arguments, by group, that the run passes to a part in addition to its settings."""

_OPTIONAL_ARGUMENTS = {item.name: item.metadata["offered"] for item in fields(Config)}

_NAMED_PARTS = {
    "evaluation.evaluators": (Evaluation.offered, ("metrics",)),
    "evaluation.stop_rules": (Evaluation.offered, ("metrics",)),
    "tracking.trackers": (Tracking.offered, ()),
}
"""Arguments that the run passes to named parts if they accept them, and keys that the parts need not accept."""

_FOR_HYDRA = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")


@cache
def runtime_settings(group: str) -> tuple[str, ...]:
    """Return the settings of a group that a part need not accept.

    The run itself reads these settings, or a preset sets them for all parts.
    """
    paths = (path for path, metadata in settings() if metadata.get("runtime") and path.startswith(f"{group}."))
    return tuple(dict.fromkeys(path.removeprefix(f"{group}.") for path in paths))


def check_targets(config: Config) -> Iterator[Violation]:
    """Check the `_target_` and the arguments of all user-defined parts."""
    for group, passed in RUN_ARGUMENTS.items():
        node = getattr(config, group)
        target = field_of(node, "_target_")
        if (
            method := next(
                (target_name for target_name in built_in_targets(group) if target_name.rpartition(".")[0] == target),
                None,
            )
        ) is not None:
            yield Violation(f"{group}._target_", f"is {target}, which does not take these settings; write {method}")
            continue
        if is_dataclass(node) and not isinstance(node, type):
            if getattr(node, "_target_", None) != getattr(type(node), "_target_", None):
                settings = {item.name: getattr(node, item.name) for item in fields(node)}
                yield from _check(settings, group, passed, runtime_settings(group))
        elif isinstance(node, dict) and "_target_" in node:
            yield from _check(node, group, passed, runtime_settings(group))
    for path, (_, optional) in _NAMED_PARTS.items():
        group, _, field = path.partition(".")
        for name, node in getattr(getattr(config, group), field).items():
            if isinstance(node, dict) and (node.get("_target_", HELD_OUT) != HELD_OUT or len(node) > 1):
                yield from _check(node, f"{path}.{name}", (), optional)


def check_own_launcher(composed: DictConfig) -> Iterator[Violation]:
    """Check the `_target_` and the arguments of a launcher outside of Hydra's packages of plugins."""
    node = OmegaConf.select(composed, "hydra.launcher")
    if isinstance(node, DictConfig) and is_own(node):
        settings = OmegaConf.to_container(node, resolve=True)
        assert isinstance(settings, dict)
        yield from _check({str(name): value for name, value in settings.items()}, "hydra.launcher", ("work",), ())


def _optional_arguments(key: str) -> tuple[str, ...]:
    """Return the arguments that the run passes to the part at a key if the part accepts them."""
    part_group = _NAMED_PARTS.get(key.rpartition(".")[0])
    return _OPTIONAL_ARGUMENTS.get(key, ()) if part_group is None else part_group[0]


def _check(
    node: Mapping[str, Any], key: str, passed: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Violation]:
    target, names = node["_target_"], [name for name in node if name not in _FOR_HYDRA]
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        yield Violation(f"{key}._target_", f"is {target} but must be the dotted path of a class or function")
        return
    try:
        parameters = resolve_parameters(target)
    except NameNotFound as error:
        hint = nearest(error.word, error.candidates)
        yield Violation(f"{key}._target_", f"is {target} but {error}{hint}")
        return
    if parameters is not None:
        yield from _check_arguments(node, key, parameters, passed, optional)
    if node.get("_recursive_", True):
        for name in names:
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
    node: Mapping[str, Any], key: str, parameters: Parameters, passed: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Violation]:
    target, num_positional = node["_target_"], len(node.get("_args_") or ())
    names = [str(name) for name in node if name not in _FOR_HYDRA]
    signature = f"it takes {', '.join(parameters.names)}" if parameters.names else "it takes no arguments"
    if not parameters.has_var_keyword:
        for name in names:
            if name not in parameters.names and name not in optional:
                message = f"is not an argument of {target}{nearest(name, parameters.names)}; {signature}"
                yield Violation(f"{key}.{name}", message)
        if missing := [name for name in passed if name not in parameters.names]:
            message = (
                f"is {target}, which has no argument {' or '.join(missing)}, but the run passes {', '.join(passed)}"
            )
            yield Violation(f"{key}._target_", f"{message} by name; {signature}")
            return
    if num_positional > parameters.max_positional:
        values = counted(num_positional, "value")
        yield Violation(f"{key}._args_", f"has {values} but {target} takes {parameters.max_positional} by position")
    is_called_by_run = not node.get("_partial_") or key in RUN_ARGUMENTS  # the run calls partial parts of these groups
    for name in parameters.names[num_positional:] if is_called_by_run else ():
        if name in parameters.required and name not in (*names, *passed, *_optional_arguments(key)):
            yield Violation(f"{key}.{name}", f"has no value but {target} needs one; give it as +{key}.{name}=...")
