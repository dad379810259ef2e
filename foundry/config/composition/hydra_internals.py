"""Uses of Hydra beyond its documented interface while composing a configuration."""

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import omegaconf.base
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.grammar_visitor import GrammarVisitor

from foundry.config.composition.hydra_versions import (
    IS_1_3,
    RUN_OVERRIDES,
    UnsupportedHydraError,
    parsed,
    require,
    since_1_4,
    without_aliases,
)

__all__ = ["CachingConfigRepository", "ConfigLoaderImpl", "ConfigResult", "IConfigRepository"]

Load = Callable[..., DictConfig]
"""Signature `load(loader, config_name, overrides, run_mode, compose)`; `compose(overrides)` is Hydra's composition."""

_LOAD = (
    *("self", "config_name", "overrides", "run_mode", "from_shell", "validate_sweep_overrides"),
    *since_1_4("skip_missing_defaults", "activate_config_repository", "parsed_overrides"),
)


Compose = Callable[[Callable[[list[str]], DictConfig], ConfigLoader, str | None, list[str], RunMode], DictConfig]
"""Signature `compose(load, loader, config_name, overrides, run_mode)`; `load(overrides)` is Hydra's composition."""


def wrap_loading(load: Load, compose_with: Compose) -> None:
    """Route every composition through `load`. Idempotent.

    Args:
        load: composes a configuration, checks it and explains errors.
        compose_with: composes overrides with Hydra's function, which it receives as `load`.

    Raises:
        UnsupportedHydraError: if this version of Hydra composes in another way.
    """
    original = require(ConfigLoaderImpl, "_load_configuration_impl", *_LOAD)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def wrapped(
        self: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        *args: Any,
        parsed_overrides: list[Override] | None = None,
        **kwargs: Any,
    ) -> DictConfig:
        def load_all(overrides: list[str]) -> DictConfig:
            composed: DictConfig = original(
                self, config_name, overrides, run_mode, *args, **kwargs, **parsed(overrides)
            )
            return composed

        def compose(overrides: list[str]) -> DictConfig:
            if (
                run_mode is RunMode.RUN
                and (composed_config := _composed_configs.pop((config_name, *overrides), None)) is not None
            ):
                return composed_config
            return compose_with(load_all, self, config_name, overrides, run_mode)

        return load(self, config_name, without_aliases(overrides, parsed_overrides), run_mode, compose)

    ConfigLoaderImpl._load_configuration_impl = wrapped  # type: ignore[method-assign]
    if not IS_1_3:
        _wrap_parsing()


def _wrap_parsing() -> None:
    """Explain overrides that are not valid as when they are composed; Hydra 1.4 parses them before."""
    original = require(ConfigLoaderImpl, "parse_overrides", "self", "config_name", "overrides", "alias_start")

    @functools.wraps(original)
    def parse_overrides(
        self: Any, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> list[Override]:
        try:
            return cast(list[Override], original(self, config_name, overrides, *args, **kwargs))
        except Exception:  # a wrong override, or a file that cannot be read
            is_sweep = not {"-m", "--multirun"}.isdisjoint(sys.argv[1:])
            mode = RunMode.MULTIRUN if is_sweep else RunMode.RUN
            ConfigLoaderImpl._load_configuration_impl(self, config_name, list(overrides), mode)
            raise

    ConfigLoaderImpl.parse_overrides = parse_overrides  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ChosenOptions:
    """Options that a composition has chosen, before their values are merged.

    Attributes:
        repo: the folders of options.
        options: the chosen option of each group.
        chosen_by: for each group whose default is overridden, the path of the file that overrides it, such as
            `hparams/llm`, or None for the command line.
    """

    repo: IConfigRepository
    options: Mapping[str, str | None]
    chosen_by: Mapping[str, str | None]


def wrap_choosing(implied_options: Callable[[ChosenOptions], Mapping[str, str]]) -> None:
    """Let options select options of other groups, in every composition. Idempotent.

    Args:
        implied_options: returns the additional options to choose, by group.

    Raises:
        UnsupportedHydraError: if this version of Hydra chooses options in another way.
    """
    from hydra._internal import config_loader_impl

    names = ("repo", "config_name", "overrides_list", "prepend_hydra", "skip_missing")
    original = require(config_loader_impl, "create_defaults_list", *names)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create(repo: Any, config_name: Any, overrides_list: list[Override], **kwargs: Any) -> Any:
        defaults = original(repo, config_name, overrides_list, **kwargs)
        state = defaults.overrides
        chosen_by = {key: meta.containing_config_path for key, meta in state.override_metadata.items()}
        implied = implied_options(ChosenOptions(repo, state.known_choices, chosen_by | dict.fromkeys(state.deletions)))
        if not implied:
            return defaults
        parsed = OverridesParser.create().parse_overrides([f"{group}={option}" for group, option in implied.items()])
        return original(repo, config_name, [*overrides_list, *parsed], **kwargs)

    setattr(config_loader_impl, "create_defaults_list", create)  # noqa: B010 - not exported, says mypy


_composed_configs: dict[tuple[str | None, ...], DictConfig] = {}
"""Configuration composed by `compose_once`, keyed by configuration name and overrides; removed when it is used."""


def compose_once(compose_with: Compose) -> None:
    """Compose the configuration of a run once to determine its mode and to run it. Idempotent.

    Hydra determines `hydra.mode` first: 1.3 by another composition, 1.4 without the options, which may set it. Here,
    the configuration is composed as for a run, and used for the run if its `hydra.mode` is null.

    Args:
        compose_with: composes overrides with Hydra's function.

    Raises:
        UnsupportedHydraError: if this version of Hydra determines the mode in another way.
    """
    from hydra._internal import hydra

    original = require(hydra.Hydra, "get_mode", "self", "config_name", "overrides", *since_1_4("parsed_overrides"))
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_mode(
        self: Any, config_name: str | None, overrides: list[str], parsed_overrides: list[Override] | None = None
    ) -> Any:
        loader, load = self.config_loader, partial(load_unchecked, self.config_loader, config_name)
        lines = without_aliases(overrides, parsed_overrides)
        try:
            composed = compose_with(load, loader, config_name, lines, RunMode.RUN)
            mode = composed.hydra.mode
        except Exception:  # perhaps a sweep; for a run, the second composition reports the error
            return _mode_of_sweep(self, config_name, overrides)
        if mode is None:
            if IS_1_3:  # Hydra 1.4 sets the mode after composing
                composed.hydra.mode = RunMode.RUN
            composed.hydra.overrides.hydra.extend(RUN_OVERRIDES)
            _composed_configs.clear()  # an entry that was never used may be out of date
            _composed_configs[(config_name, *lines, *RUN_OVERRIDES)] = composed
        return mode

    hydra.Hydra.get_mode = get_mode  # type: ignore[method-assign]


def _mode_of_sweep(application: Any, config_name: str | None, overrides: list[str]) -> Any:
    """Return the `hydra.mode` of a sweep's configuration, or None if it cannot be composed, as in Hydra 1.3."""
    try:
        composed = application.compose_config(
            config_name, overrides, run_mode=RunMode.MULTIRUN, validate_sweep_overrides=False
        )
        return composed.hydra.mode
    except Exception:  # reported by the composition for the sweep or run
        return None


class _LazyNode(ConfigNode):
    """Schema in Hydra's store that is converted to an OmegaConf node when it is loaded.

    A run loads a fifth of the schemas.

    Hydra copies its store for each configuration that it composes; this class avoids the copy of a schema. From the
    second load on, the node is unpickled, in at most a tenth of the time of the conversion.
    """

    def __init__(self, name: str, group: str | None, make: Callable[[], DictConfig]) -> None:
        self.name, self.group, self.package, self.provider = name, group, None, None
        self._make = make
        self._loads, self._pickled = 0, b""

    def __copy__(self) -> ConfigNode:
        self._loads += 1
        if self._loads == 2:
            self._pickled = pickle.dumps(self._make())
        node = pickle.loads(self._pickled) if self._pickled else self._make()
        return ConfigNode(self.name, node, self.group, self.package, self.provider)

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def store_lazily(name: str, make: Callable[[], DictConfig], *, group: str | None = None) -> None:
    """Store a schema as `ConfigStore.store()` of Hydra does, but make its node only when the schema is loaded.

    Raises:
        UnsupportedHydraError: if this version of Hydra stores schemas in another way.
    """
    store: Any = require(ConfigStore.instance(), "repo")
    require(ConfigNode, "__init__", "self", "name", "node", "group", "package", "provider")
    for folder in () if group is None else group.split("/"):
        store = store.setdefault(folder, {})
    store[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", group, make)


def cache_interpolations() -> None:
    """Cache OmegaConf's parser, and the arguments of resolvers that are constants. Idempotent.

    So each interpolation is parsed once. Parsing takes a third of the time of composing jobs.

    Raises:
        UnsupportedHydraError: if this version of OmegaConf parses in another way.
    """
    parse = require(omegaconf.base, "parse", "value", "parser_rule", "lexer_mode")
    visit = require(GrammarVisitor, "visitSequence", "self", "ctx")
    if hasattr(parse, "cache_info"):
        return

    @functools.wraps(visit)
    def visit_sequence(self: Any, ctx: Any) -> Iterator[Any]:
        if (constants := getattr(ctx, "constants", None)) is not None:
            return iter(constants)
        elements = list(visit(self, ctx))
        if "${" not in ctx.getText() and not any(isinstance(value, (list, dict)) for value, _ in elements):
            ctx.constants = elements
        return iter(elements)

    omegaconf.base.parse = functools.lru_cache(4096)(parse)  # type: ignore[attr-defined]
    GrammarVisitor.visitSequence = visit_sequence  # type: ignore[assignment]


def skip_unused_choices() -> None:
    """Collect the choices for interpolations in a defaults list only if the list has interpolations. Idempotent.

    Hydra 1.3 collects the choices for every file with options, which takes a third of the time of composing; Hydra 1.4
    does not.

    Raises:
        UnsupportedHydraError: if this version of Hydra collects choices in another way.
    """
    if not IS_1_3:
        return
    from hydra._internal import defaults_list

    names = ("overrides", "defaults_list", "self_added")
    original = require(defaults_list, "_create_interpolation_map", *names)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create(overrides: Any, defaults_list: list[InputDefault], self_added: bool) -> DictConfig:
        if any(not default.is_override() and default.is_interpolation() for default in defaults_list):
            known: DictConfig = original(overrides, defaults_list, self_added)
            return known
        return DictConfig({})

    setattr(defaults_list, "_create_interpolation_map", create)  # noqa: B010 - private, says mypy


def cache_option_files(current: Callable[[], dict[tuple[object, ...], bytes] | None]) -> None:
    """Read each file of options once per cache. Idempotent.

    Hydra reads and parses all files again for each composition, which takes two fifths of the time of composing.

    Args:
        current: returns the cache, which maps search path and file to the pickled content; None to read every file.

    Raises:
        UnsupportedHydraError: if this version of Hydra reads files in another way.
    """
    original = require(ConfigRepository, "load_config", "self", "config_path")
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def load_config(self: ConfigRepository, config_path: str) -> ConfigResult | None:
        if (cache := current()) is None:
            return cast(ConfigResult | None, original(self, config_path))
        key = (*((source.provider, source.path) for source in self.sources), config_path)
        if key not in cache:
            cache[key] = pickle.dumps(original(self, config_path))
        return cast(ConfigResult | None, pickle.loads(cache[key]))

    ConfigRepository.load_config = load_config  # type: ignore[method-assign]


def load_unchecked(loader: ConfigLoader, config_name: str | None, overrides: list[str]) -> DictConfig:
    """Compose overrides for a run with Hydra's original function, without the wrapper of `wrap_loading`."""
    load = inspect.unwrap(require(ConfigLoaderImpl, "_load_configuration_impl", *_LOAD))
    composed: DictConfig = load(loader, config_name, overrides, RunMode.RUN, **parsed(overrides))
    return composed


class OptionRepository(CachingConfigRepository):
    """Repository of options that reads each file and lists each folder once; files must not change meanwhile."""

    def __init__(self, delegate: IConfigRepository) -> None:
        super().__init__(delegate)
        self._kept: dict[tuple[object, ...], Any] = {}

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Replace the folders of options."""
        super().initialize_sources(config_search_path)
        self._kept.clear()

    def group_exists(self, config_path: str) -> bool:
        """Return whether a group exists."""
        return bool(self._once("group_exists", config_path))

    def config_exists(self, config_path: str) -> bool:
        """Return whether an option exists."""
        return bool(self._once("config_exists", config_path))

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        """Return a new list of the names of a group's options, or of its groups."""
        return list(self._once("get_group_options", group_name, results_filter))

    def _once(self, method: str, *arguments: object) -> Any:
        key = (method, *arguments)
        if key not in self._kept:
            self._kept[key] = getattr(self.delegate, method)(*arguments)
        return self._kept[key]


def open_repository(
    loader: ConfigLoader, config_name: str | None, overrides: Sequence[Override]
) -> tuple[CachingConfigRepository, Exception | None]:
    """Return the repository of options, including `hydra.searchpath`, and the error in that setting or None."""
    names = ("self", "config_name", "parsed_overrides", "repo")
    add_search_path = require(ConfigLoaderImpl, "_process_config_searchpath", *names)
    repository = OptionRepository(require_loader(loader).repository)
    try:
        add_search_path(loader, config_name, list(overrides), repository)
    except Exception as error:  # any error of Hydra, OmegaConf or a file system about the folder
        return repository, error
    return repository, None


Edit = Callable[[str, ConfigResult], ConfigResult]
"""`edit(path, loaded)`: returns the content to use for a file of options; `path` has no `.yaml`."""


@contextmanager
def edited_files(loader: ConfigLoaderImpl, edit_defaults: Edit, edit_content: Edit) -> Iterator[None]:
    """Pass each file that a loader reads through two functions.

    Args:
        loader: Hydra's loader.
        edit_defaults: called with each file after it is read, before its defaults list is followed.
        edit_content: called with each file after its keys are placed under the root, in the order of merging.

    Raises:
        UnsupportedHydraError: if this version of Hydra loads files in another way.
    """
    names = ("config_name", "overrides", *since_1_4("parsed_overrides"))
    parse = require(loader, "_parse_overrides_and_create_caching_repo", *names)
    load = require(loader, "_load_single_config", "default", "repo")

    def parse_and_open(*args: Any, **kwargs: Any) -> Any:
        parsed, repo = parse(*args, **kwargs)
        load_config = repo.load_config

        def edited(config_path: str) -> ConfigResult | None:
            loaded = load_config(config_path)
            return None if loaded is None else edit_defaults(config_path, copy.copy(loaded))

        repo.load_config = edited
        return parsed, repo

    def load_single(default: Any, repo: IConfigRepository) -> ConfigResult:
        return edit_content(default.config_path, load(default=default, repo=repo))

    loader_attributes = vars(loader)
    loader_attributes.update(_parse_overrides_and_create_caching_repo=parse_and_open, _load_single_config=load_single)
    try:
        yield
    finally:
        del loader_attributes["_parse_overrides_and_create_caching_repo"], loader_attributes["_load_single_config"]


def ignore_long_names() -> None:
    """Make Hydra treat a name that is not a valid file name as a group or option that does not exist. Idempotent.

    Hydra looks up each key and each value of the command line in the file system, and does not catch the OSError that
    a too long name raises.
    """
    Plugins.instance()  # registers the sources and reloads their modules
    source = SourcesRegistry.instance().resolve("pkg")
    for name in ("is_group", "is_config"):
        original = require(source, name, "self", "config_path")
        if not hasattr(original, "__wrapped__"):
            setattr(source, name, _false_if_unusable(original))


def _false_if_unusable(exists: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(exists)
    def answer(self: ConfigSource, config_path: str) -> bool:
        try:
            return exists(self, config_path)
        except OSError:
            return False

    return answer


def require_loader(loader: ConfigLoader) -> ConfigLoaderImpl:
    """Return the loader as Hydra's own class.

    Raises:
        UnsupportedHydraError: if the loader has another class.
    """
    if not isinstance(loader, ConfigLoaderImpl):
        raise UnsupportedHydraError(f"composes with a {type(loader).__name__}")
    return loader


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Apply value overrides to a composed configuration, as Hydra does."""
    require(ConfigLoaderImpl, "_apply_overrides_to_config", "overrides", "cfg")(list(overrides), config)


def search_path(folder: str) -> ConfigSearchPath:
    """Return Hydra's search path of options, with `folder` after the options of Hydra itself."""
    from hydra._internal import utils

    path: ConfigSearchPath = require(utils, "create_config_search_path", "search_path_dir")(folder)
    return path
