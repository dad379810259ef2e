"""Differences between the versions of Hydra and OmegaConf that setup.cfg allows.

Hydra 1.3 requires OmegaConf 2.3, and Hydra 1.4 requires OmegaConf 2.4. A version of Hydra that lacks a function or
class that foundry uses, or has other parameters, is rejected with an error that names the version.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import hydra
from hydra import version
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

SUPPORTED = ">=1.3.8,<1.5"
"""Versions of hydra-core that setup.cfg allows."""

IS_1_3 = hydra.__version__.startswith("1.3.")
"""Whether this is Hydra 1.3. Otherwise it is 1.4, or a version that `require` rejects."""

VERSION_BASE = {"version_base": "1.3"} if IS_1_3 else {}
"""Arguments of Hydra's functions that make 1.3 behave as documented; 1.4 warns about them and needs none."""

RUN_OVERRIDES = ("hydra.mode=RUN",) if IS_1_3 else ()
"""Overrides that Hydra adds to the overrides of a run."""

_LIBRARIES = frozenset({"foundry", "torch", "transformers", "diffusers", "peft"})
"""Packages of callable objects that nested parts may return; Hydra 1.4 checks the class of each."""


class UnsupportedHydraError(HydraException):
    """Raised if the installed version of Hydra is not supported."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"hydra-core {hydra.__version__} {problem}; install hydra-core{SUPPORTED}")


def require(owner: Any, name: str, *parameters: str) -> Any:
    """Return an undocumented function or class of Hydra, after checking its parameters.

    Args:
        owner: module or class that has the attribute.
        name: name of the attribute.
        parameters: expected parameter names, in order; empty to skip the check.

    Raises:
        UnsupportedHydraError: if the attribute is missing or takes other parameters.
    """
    attribute = getattr(owner, name, None)
    path = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    if attribute is None:
        raise UnsupportedHydraError(f"has no {path}")
    if parameters and (names := tuple(inspect.signature(inspect.unwrap(attribute)).parameters)) != parameters:
        raise UnsupportedHydraError(f"takes {', '.join(names)} in {path}, not {', '.join(parameters)}")
    return attribute


def since_1_4(*parameters: str) -> tuple[str, ...]:
    """Return the names of parameters that Hydra 1.4 has added to a function; none in Hydra 1.3."""
    return () if IS_1_3 else parameters


def hydra_main(config_path: str, config_name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Return Hydra's decorator for the task of an application.

    Hydra 1.4 calls only functions that the application allows: here foundry's sweepers, launchers and log handlers.
    """
    allowed: dict[str, Any] = {} if IS_1_3 else {"execution_whitelist": ["foundry.*"]}
    return hydra.main(config_path=config_path, config_name=config_name, **VERSION_BASE, **allowed)


def use_current_behavior() -> None:
    """Make Hydra behave as with `VERSION_BASE`."""
    if IS_1_3:
        version.setbase("1.3")


def parsed(lines: Sequence[str]) -> dict[str, list[Override]]:
    """Return the argument that makes Hydra 1.4 use `lines` without parsing them again; no argument in Hydra 1.3.

    When Hydra 1.4 parses overrides, it replaces the aliases of the primary configuration; `lines` no longer have any.

    Raises:
        OverrideParseException: in Hydra 1.4, if a line is not a valid override.
    """
    return {} if IS_1_3 else {"parsed_overrides": OverridesParser.create().parse_overrides(list(lines))}


def without_aliases(lines: Sequence[str], parsed_overrides: Sequence[Override] | None = None) -> list[str]:
    """Return overrides as Hydra 1.4 has parsed them, with the setting in place of an alias; `lines` in Hydra 1.3."""
    if parsed_overrides is None:
        return list(lines)
    return [str(override.input_line) for override in parsed_overrides]


def record_override_dirname(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Write `hydra.job.override_dirname` of a job; in Hydra 1.4 a resolver computes it from the overrides."""
    if not IS_1_3:
        return
    from hydra._internal import config_loader_impl

    make = require(config_loader_impl, "get_overrides_dirname", "overrides", "exclude_keys", "item_sep", "kv_sep")
    options = config.hydra.job.config.override_dirname
    config.hydra.job.override_dirname = str(
        make(list(overrides), options.exclude_keys, options.item_sep, options.kv_sep)
    )


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register a resolver with OmegaConf, which replaces a resolver of the same name.

    OmegaConf 2.4 has renamed the method. Unlike 2.3 it can warn about the types of arguments; foundry's checks report
    these.
    """
    if IS_1_3:
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    else:
        register = require(OmegaConf, "register_resolver")
        register(name, resolver, replace=True, annotation_validation="off")


def yaml_loader() -> Any:
    """Return OmegaConf's class that loads YAML."""
    return require(import_module("omegaconf._utils" if IS_1_3 else "omegaconf._yaml"), "get_yaml_loader")()


def log_targets(settings: Any) -> Iterator[str]:
    """Yield the names of functions and classes in settings of Python's logging, as plain containers."""
    children = settings.items() if isinstance(settings, dict) else enumerate(settings)
    for key, value in children:
        if isinstance(value, (dict, list)):
            yield from log_targets(value)
        elif isinstance(value, str) and (key in ("class", "()") or value.startswith("ext://")):
            yield value.removeprefix("ext://")


def refusal(target: str) -> str:
    """Return the message about a target that Hydra refuses."""
    return f"is {target}, which Hydra does not call from a configuration; write a function that calls it, and name that"


@cache
def is_refused(target: str) -> bool:
    """Return whether Hydra refuses to call a function that a configuration names: it runs programs or changes files."""
    module = import_module(f"hydra._internal.{'target_policy' if IS_1_3 else 'execution_policy'}")
    refuses = require(module, "_is_blocklisted_target" if IS_1_3 else "_is_blacklisted_target", "target")
    return bool(refuses(target))


def instantiate(node: DictConfig) -> Any:
    """Return the `_target_` of a node as a partial function of the other fields, after building nested parts.

    Hydra 1.4 calls only functions that its caller allows: here the targets that the node names, if Hydra 1.3 would call
    them too.

    Raises:
        InstantiationException: Hydra refuses a target, or a nested part cannot be built.
    """
    from hydra.utils import instantiate as hydra_instantiate

    options: dict[str, Any] = {"_partial_": True, "_convert_": "all"}
    if IS_1_3:
        return hydra_instantiate(node, **options)
    try:
        part = hydra_instantiate(node, _execution_whitelist_=_allowed_targets(node), **options)
    except InstantiationException:
        raise
    except Exception as error:  # raised by a nested part; Hydra 1.3 wraps it
        raise InstantiationException(f"cannot build a part of {node._get_node('_target_')}: {error!r}") from error
    # The part may return an object of any package; Hydra still checks it against its own list of functions.
    require(part, "_hydra_execution_whitelist")
    part._hydra_execution_whitelist = None
    return part


def targets_allowed(node: DictConfig) -> AbstractContextManager[Any]:
    """Let a part that builds its nested parts itself, because of `_recursive_: false`, call the targets in its node.

    Hydra 1.4 would refuse them in the process of an application; Hydra 1.3 calls them.
    """
    if IS_1_3:
        return nullcontext()
    allowed: AbstractContextManager[Any] = require(hydra.utils, "execution_whitelist")(_allowed_targets(node))
    return allowed


def _allowed_targets(node: DictConfig) -> list[str]:
    """Return each target in a node, and patterns for the classes that these targets return.

    Raises:
        InstantiationException: Hydra refuses a target by this or another name, such as `logging.os.system`.
    """
    locate = require(import_module("hydra._internal.utils"), "_locate", "path")
    identify = require(
        import_module("hydra._internal.execution_policy"), "_get_resolved_target_name_for_check", "target"
    )
    targets = list(_targets(node))
    for target in targets:
        try:
            name = identify(locate(target))
        except Exception:
            continue
        if is_refused(target) or is_refused(name):
            raise InstantiationException(f"_target_ {refusal(target)}")
    packages = {target.partition(".")[0] for target in targets} - sys.stdlib_module_names
    return [*targets, *(f"{package}.*" for package in sorted(packages | _LIBRARIES))]


def _targets(node: Any) -> Iterator[str]:
    """Yield each `_target_` at any depth of a node."""
    if isinstance(node, DictConfig) and not node._is_none():
        for key in node:
            if key == "_target_" and isinstance(node[key], str):
                yield node[key]
            else:
                yield from _targets(node._get_node(key))
    elif isinstance(node, ListConfig) and not node._is_none():
        for index in range(len(node)):
            yield from _targets(node._get_node(index))
