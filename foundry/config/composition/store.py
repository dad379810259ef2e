"""Registration of the schemas with Hydra."""

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from foundry.config.composition.hydra_internals import store_lazily
from foundry.config.schemas import built_in_evaluators
from foundry.config.schemas.launcher import SCHEMAS as LAUNCHERS
from foundry.config.schemas.root import Config
from foundry.config.schemas.sweeper import SCHEMAS as SWEEPERS
from foundry.core.errors import ConfigError, Violation
from foundry.core.tasks import EVALUATORS, modules_of

GROUPS = (
    "checkpoint",
    "data",
    "device",
    "distributed",
    "environment",
    "evaluation",
    "guard",
    "hparams",
    "model",
    "objective",
    "optimizer",
    "peft",
    "precision",
    "scheduler",
    "simulator",
    "tracking",
)


def group_schemas(group: str) -> dict[str, type[Any]]:
    """Return the schemas of a group by class name: every dataclass that its modules define.

    Raises:
        ConfigError: if two modules of the group define schemas of the same name.
    """
    schemas: dict[str, type[Any]] = {}
    for schema in (schema for module in group_modules(group) for schema in schemas_in(module)):
        if schemas.setdefault(schema.__name__, schema) is not schema:
            message = f"has the same name as {schemas[schema.__name__].__module__}.{schema.__name__}; rename it"
            raise ConfigError(Violation(f"{schema.__module__}.{schema.__name__}", message))
    return schemas


def group_modules(group: str) -> list[ModuleType]:
    """Return the modules with schemas of a group: its package, the modules in it, and the modules of tasks."""
    package = import_module(f"foundry.config.schemas.{group}")
    files = [
        import_module(f"{package.__name__}.{file.name}") for file in iter_modules(getattr(package, "__path__", ()))
    ]
    return [package, *files, *modules_of(group)]


def evaluator_schemas() -> list[type[Any]]:
    """Return the schemas of foundry's and all tasks' evaluators, which are chosen by `_target_`."""
    return [schema for module in (built_in_evaluators, *modules_of(EVALUATORS)) for schema in schemas_in(module)]


def schemas_in(module: ModuleType) -> list[type[Any]]:
    """Return every dataclass that a module defines."""
    dataclasses = [value for value in vars(module).values() if isinstance(value, type) and is_dataclass(value)]
    return [value for value in dataclasses if value.__module__ == module.__name__]


def fill_missing_parts(composed: DictConfig) -> None:
    """Set environment and simulator to `NoEnvironment` and `NoSimulator` if a configuration lacks them."""
    for item in fields(Config):
        schema: Any = item.default_factory
        if item.type is Any and schema is not NO_DEFAULT and OmegaConf.is_missing(composed, item.name):
            composed[item.name] = writable(schema)


@cache
def register_schemas() -> None:
    """Store the schemas of all groups as `schema/<group>/<ClassName>`, and the root schema as `base_config`.

    Schemas are stored apart from the options, so that completion and error messages list only options to choose.
    """
    store_lazily("base_config", _base_config)
    schemas = {group: group_schemas(group).values() for group in GROUPS}
    for group, members in {**schemas, "sweep": SWEEPERS, "launcher": LAUNCHERS}.items():
        for schema in members:
            store_lazily(schema.__name__, partial(writable, schema), group=f"schema/{group}")


def _base_config() -> DictConfig:
    """Return the node of the root schema, without values for the parts that options choose."""
    base = writable(Config)
    for item in fields(Config):
        if item.type is Any:
            base[item.name] = MISSING  # chosen by an option; a recorded configuration may lack it
    return base


def writable(schema: type[Any]) -> DictConfig:
    """Return a schema as a node that composition can fill in.

    By default, the node of a frozen dataclass is read-only.
    """
    node = OmegaConf.structured(schema)
    assert isinstance(node, DictConfig)
    _unlock(node)
    return node


def _unlock(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for key in node:
        if not OmegaConf.is_missing(node, key) and isinstance(child := node._get_node(key), DictConfig):
            _unlock(child)
