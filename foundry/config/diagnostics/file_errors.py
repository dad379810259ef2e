"""Search for all wrong keys, values and options in configuration files; Hydra stops at the first error."""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from foundry.config.composition.choices import Choices
from foundry.config.composition.hydra_internals import (
    ConfigLoaderImpl,
    ConfigResult,
    IConfigRepository,
    edited_files,
)
from foundry.config.diagnostics.missing_values import as_override
from foundry.config.diagnostics.other_frameworks import is_name
from foundry.core.errors import Violation, first_line


@dataclass(frozen=True)
class WrongEntry:
    """Key of a file that cannot be merged, represented as an override.

    Attributes:
        file: file name for messages.
        override: override that sets the key to the value in the file.
        error: exception raised by merging the value.
    """

    file: str
    override: Override
    error: OmegaConfBaseException


@dataclass(frozen=True)
class WrongChoice:
    """Option in a defaults list that does not exist.

    Attributes:
        file: file name for messages.
        override: override that chooses the option.
        incomplete: group of the file if the file extends the missing option, whose keys are unknown; else empty.
    """

    file: str
    override: Override
    incomplete: str


@dataclass
class Composed:
    """Configuration composed without the wrong entries of configuration files, and a list of the wrong entries.

    Attributes:
        config: the configuration; None if composing fails even without the wrong entries.
        error: exception of that failure; None if composing succeeds.
        entries: keys and values that could not be merged.
        choices: options that do not exist, keyed by file and choice.
    """

    config: DictConfig | None = None
    error: Exception | None = None
    entries: list[WrongEntry] = field(default_factory=list)
    choices: dict[str, WrongChoice] = field(default_factory=dict)


def compose_without_wrong_entries(
    loader: ConfigLoaderImpl,
    compose: Callable[[list[str]], DictConfig],
    overrides: list[str],
    *,
    repo: IConfigRepository,
    chosen_groups: Collection[str],
) -> Composed:
    """Compose overrides, leaving out the wrong entries of configuration files.

    Args:
        loader: the loader that `compose` uses.
        compose: composes overrides without checks.
        overrides: valid overrides.
        repo: the options of the groups.
        chosen_groups: groups with an option chosen by the overrides; choices of files for these groups are ignored.
    """
    result, base = Composed(), OmegaConf.create()

    def drop_unknown_options(path: str, loaded: ConfigResult) -> ConfigResult:
        known_entries = []
        for entry in loaded.defaults_list or []:
            unknown = [] if loaded.is_schema_source else list(_unknown_options(path, entry, repo, chosen_groups))
            for override in unknown:  # Hydra loads a file several times, hence the dictionary
                group = path.rpartition("/")[0] if isinstance(entry, ConfigDefault) else ""
                result.choices[f"{path} {override.input_line}"] = WrongChoice(_name(path, loaded), override, group)
            known_entries += [] if unknown else [entry]
        loaded.defaults_list = known_entries if loaded.defaults_list is not None else None
        return loaded

    def drop_wrong_entries(path: str, loaded: ConfigResult) -> ConfigResult:
        try:
            base.merge_with(copy.deepcopy(loaded.config))
        except OmegaConfBaseException as error_of_file:
            if not isinstance(loaded.config, DictConfig):
                raise
            config = copy.deepcopy(loaded.config)
            for keys, override, error in _wrong_entries(base, config):
                _delete(config, keys)
                result.entries.append(WrongEntry(_name(path, loaded), override, error))
            if config == loaded.config:
                raise error_of_file
            loaded = copy.copy(loaded)
            loaded.config = config
        return loaded

    with Choices().used(), edited_files(loader, drop_unknown_options, drop_wrong_entries):
        try:
            result.config = compose(overrides)
        except Exception as error:  # any error of Hydra, OmegaConf, YAML or a file system
            result.error = error
    return result


def describe_yaml_error(error: Exception) -> Violation | None:
    """Return the error for a file that is not valid YAML, with the line; None if the exception has another cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, yaml.MarkedYAMLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or cause.problem_mark is None:
        return None
    mark, problem = cause.problem_mark, " ".join(str(cause.problem).split())
    return Violation(_shortest(Path(mark.name)), f"is not valid YAML: line {mark.line + 1}: {problem}")


def _wrong_entries(
    base: DictConfig, config: DictConfig
) -> Iterator[tuple[list[Any], Override, OmegaConfBaseException]]:
    """Merge a file into `base` value by value, and yield the entries that fail.

    Each comes with the keys to delete from the content of the file, the entry as an override, and the error.
    """
    content, reported = copy.deepcopy(config), set[str]()
    for keys in list(_paths(content)):
        try:
            base.merge_with(_nest(keys, _value_at(content, keys)))
        except OmegaConfBaseException as error:
            path, depth = ".".join(map(str, keys)), len(keys)
            if isinstance(error.full_key, str) and path.startswith(f"{error.full_key}."):
                depth = error.full_key.count(".") + 1
                if not (isinstance(error, ConfigKeyError) and is_name(path)):  # report one error for the whole section
                    keys, path = keys[:depth], error.full_key
            if path not in reported:
                reported.add(path)
                node = _value_at(content, keys)
                value: Any = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
                line = f"{path}={as_override(value)}"
                yield keys[:depth], Override(OverrideType.CHANGE, path, None, value, input_line=line), error


def _nest(keys: list[Any], value: Any) -> DictConfig:
    for key in reversed(keys):
        value = {key: value}
    nested: DictConfig = OmegaConf.create(value)
    return nested


def _unknown_options(
    path: str, entry: Any, repo: IConfigRepository, chosen_groups: Collection[str]
) -> Iterator[Override]:
    folder, names = PurePosixPath("/", path).parent, list[Any]()
    if isinstance(entry, ConfigDefault) and entry.path is not None and not (entry.optional or entry.is_self()):
        file = folder / entry.path
        group, names = str(file.parent).lstrip("/"), [file.name]
    elif isinstance(entry, GroupDefault) and entry.group is not None and not entry.optional:
        group = str(("/" if entry.override else folder) / PurePosixPath(entry.group)).lstrip("/")
        names = entry.value if isinstance(entry.value, list) else [entry.value]
        if group in chosen_groups:
            return
    else:
        return
    for name in names:
        file = PurePosixPath(group, str(name))
        if isinstance(name, str) and "$" not in name and name != "???" and not repo.config_exists(str(file)):
            yield Override(OverrideType.CHANGE, group, None, name, input_line=f"{group}={name}")


def _paths(config: DictConfig, parents: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
    """Yield the keys that lead to each value, and to each empty section."""
    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing() and len(node):
            yield from _paths(node, (*parents, key))
        else:
            yield [*parents, key]


def _value_at(config: DictConfig, keys: list[Any]) -> Any:
    """Return the value at a path of keys, unresolved."""
    node: Any = config
    for key in keys:
        node = node._get_node(key)
    return node if OmegaConf.is_config(node) and node._value() not in (None, "???") else node._value()


def _delete(config: DictConfig, keys: list[Any]) -> None:
    """Delete the value at a path of keys, unless it was deleted with its section."""
    parent: Any = config
    for key in keys[:-1]:
        parent = parent._get_node(key)
        if parent is None:
            return
    parent._content.pop(keys[-1], None)


def _name(path: str, loaded: ConfigResult) -> str:
    """Return the name of a file for messages, relative to the current folder if the file lies in it."""
    name = path if path.endswith((".yaml", ".yml")) else f"{path}.yaml"
    folder = loaded.path.partition("://")[2] if loaded.path.startswith("file://") else ""
    return _shortest(Path(folder, name)) if folder else name


def _shortest(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def in_file(file: str, violation: Violation) -> Violation:
    """Return a violation with the file name added to its key."""
    return Violation(f"{file}: {violation.key}", first_line(violation.message))
