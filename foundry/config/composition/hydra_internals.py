"""All uses of Hydra beyond its documented interface.

A version of Hydra that lacks a function or class used here, or has other parameters, is rejected with an error that
names the version.
"""

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
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.plugin import Plugin
from hydra.types import RunMode
from omegaconf import DictConfig

__all__ = ["CachingConfigRepository", "ConfigLoaderImpl", "ConfigResult", "IConfigRepository"]

SUPPORTED = ">=1.3.8,<1.4"
"""Versions of hydra-core that setup.cfg allows."""

Load = Callable[..., DictConfig]
"""Signature `load(loader, config_name, overrides, run_mode, compose)`; `compose(overrides)` is Hydra's composition."""

_LOAD = ("self", "config_name", "overrides", "run_mode", "from_shell", "validate_sweep_overrides")


class UnsupportedHydraError(HydraException):
    """Raised if the installed version of Hydra is not supported."""

    def __init__(self, problem: str) -> None:
        from importlib.metadata import version

        super().__init__(f"hydra-core {version('hydra-core')} {problem}; install hydra-core{SUPPORTED}")


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
        **kwargs: Any,
    ) -> DictConfig:
        def load_all(overrides: list[str]) -> DictConfig:
            composed: DictConfig = original(self, config_name, overrides, run_mode, *args, **kwargs)
            return composed

        def compose(overrides: list[str]) -> DictConfig:
            if (
                run_mode is RunMode.RUN
                and (composed_config := _composed_configs.pop((config_name, *overrides), None)) is not None
            ):
                return composed_config
            return compose_with(load_all, self, config_name, overrides, run_mode)

        return load(self, config_name, overrides, run_mode, compose)

    ConfigLoaderImpl._load_configuration_impl = wrapped  # type: ignore[method-assign]


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


_RUN = "hydra.mode=RUN"
_composed_configs: dict[tuple[str | None, ...], DictConfig] = {}
"""Configuration composed by `compose_once`, keyed by configuration name and overrides; removed when it is used."""


def compose_once(compose_with: Compose) -> None:
    """Compose the configuration of a run once instead of twice. Idempotent.

    Hydra first composes a configuration and reads only its `hydra.mode`. Here, that configuration is composed as for a
    run, and if its `hydra.mode` is null, Hydra's second composition reuses it.

    Args:
        compose_with: composes overrides with Hydra's function.

    Raises:
        UnsupportedHydraError: if this version of Hydra determines the mode in another way.
    """
    from hydra._internal import hydra

    original = require(hydra.Hydra, "get_mode", "self", "config_name", "overrides")
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_mode(self: Any, config_name: str | None, overrides: list[str]) -> Any:
        loader, load = self.config_loader, partial(load_unchecked, self.config_loader, config_name)
        try:
            composed = compose_with(load, loader, config_name, list(overrides), RunMode.RUN)
            mode = composed.hydra.mode
        except Exception:  # perhaps a sweep; for a run, the second composition reports the error
            return original(self, config_name, overrides)
        if mode is None:  # Hydra then adds the override `hydra.mode=RUN`
            composed.hydra.mode = RunMode.RUN
            composed.hydra.overrides.hydra.append(_RUN)
            _composed_configs.clear()  # an entry that was never used may be out of date
            _composed_configs[(config_name, *overrides, _RUN)] = composed
        return mode

    hydra.Hydra.get_mode = get_mode  # type: ignore[method-assign]


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
    """Cache OmegaConf's parser, so that each interpolation is parsed once.

    Parsing takes a third of the time of composing jobs.
    """
    if not hasattr(parse := require(omegaconf.base, "parse", "value", "parser_rule", "lexer_mode"), "cache_info"):
        omegaconf.base.parse = functools.lru_cache(4096)(parse)  # type: ignore[attr-defined]


def skip_unused_choices() -> None:
    """Collect the choices for interpolations in a defaults list only if the list has interpolations. Idempotent.

    Hydra collects the choices for every file with options, which takes a third of the time of composing.

    Raises:
        UnsupportedHydraError: if this version of Hydra collects choices in another way.
    """
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
    composed: DictConfig = load(loader, config_name, overrides, RunMode.RUN)
    return composed


def open_repository(
    loader: ConfigLoader, config_name: str | None, overrides: Sequence[Override]
) -> tuple[CachingConfigRepository, Exception | None]:
    """Return the repository of options, including `hydra.searchpath`, and the error in that setting or None."""
    names = ("self", "config_name", "parsed_overrides", "repo")
    add_search_path = require(ConfigLoaderImpl, "_process_config_searchpath", *names)
    repository = CachingConfigRepository(require_loader(loader).repository)
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
    parse = require(loader, "_parse_overrides_and_create_caching_repo", "config_name", "overrides")
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


def override_dirname(overrides: Sequence[Override], config: DictConfig) -> str:
    """Return `hydra.job.override_dirname` of a job with these overrides."""
    from hydra._internal import config_loader_impl

    make = require(config_loader_impl, "get_overrides_dirname", "overrides", "exclude_keys", "item_sep", "kv_sep")
    options = config.hydra.job.config.override_dirname
    return str(make(list(overrides), options.exclude_keys, options.item_sep, options.kv_sep))


def search_path(folder: str) -> ConfigSearchPath:
    """Return Hydra's search path of options, with `folder` after the options of Hydra itself."""
    from hydra._internal import utils

    path: ConfigSearchPath = require(utils, "create_config_search_path", "search_path_dir")(folder)
    return path


@contextmanager
def current_config(composed: DictConfig) -> Iterator[None]:
    """Make `${hydra:...}` refer to `composed` within the context. `HydraConfig.set_config` would make a copy.

    Raises:
        UnsupportedHydraError: if this version of Hydra keeps its configuration elsewhere.
    """
    state = HydraConfig.instance()
    if "cfg" not in vars(state):
        raise UnsupportedHydraError("has no HydraConfig.cfg")
    previous = state.cfg
    state.cfg = cast(Any, composed)
    try:
        yield
    finally:
        state.cfg = previous


def register_plugin(name: str, make: Callable[..., Plugin]) -> None:
    """Register with Hydra a callable that makes the sweeper or launcher of this name.

    Hydra only searches its package of plugins. `Plugins.register` would register a class under the name of the class's
    own module, and Hydra refuses to instantiate a plugin by the name of a module outside of that package.

    Raises:
        UnsupportedHydraError: if this version of Hydra keeps its plugins elsewhere.
    """
    require(Plugins.instance(), "class_name_to_class")[name] = make


def error_of(result: JobReturn) -> BaseException | None:
    """Return the exception that a job raised, or None. The property `return_value` would raise the exception."""
    if result.status is not JobStatus.FAILED:
        return None
    error = require(result, "_return_value")
    return error if isinstance(error, BaseException) else None


def write_help(
    primary_config: str, write_page: Callable[[ConfigLoader], str], write_sweep_page: Callable[[ConfigLoader], str]
) -> None:
    """Make `--help` print a page without composing a configuration; in Hydra, composing takes half of the time.

    Hydra's own page is printed for another primary configuration and, without `-m`, if there are overrides or folders
    of options, which may change the page.

    Args:
        primary_config: name of the primary configuration that the page describes.
        write_page: returns the help page of a run.
        write_sweep_page: returns the help page of `-m`.

    Raises:
        UnsupportedHydraError: if this version of Hydra writes its page in another way.
    """
    from hydra._internal import hydra

    original = inspect.unwrap(require(hydra.Hydra, "app_help", "self", "config_name", "args_parser", "args"))

    @functools.wraps(original)
    def app_help(self: Any, config_name: str | None, args_parser: Any, args: Any) -> None:
        if config_name == primary_config and args.multirun:
            sys.stdout.write(f"{write_sweep_page(self.config_loader)}\n")
        elif config_name != primary_config or args.overrides or args.config_dir or args.config_path:
            self.overrides_of_help = list(args.overrides)  # may set hydra.searchpath, which adds folders of options
            original(self, config_name, args_parser, args)
        else:
            sys.stdout.write(f"{write_page(self.config_loader)}\n")

    hydra.Hydra.app_help = app_help  # type: ignore[method-assign]


def replace_run_job(
    run_job: Callable[..., JobReturn], list_groups: Callable[[ConfigLoader, Sequence[str]], str]
) -> None:
    """Run jobs with `run_job`, and let `hydra.main` raise errors unchanged.

    Hydra would print a config error with its own remarks, exit with code 1, and shorten the traceback of real failures.

    Args:
        run_job: replaces Hydra's `run_job`, which makes the directory and writes files before the task begins.
        list_groups: returns the list of groups for the page of `--help`, from the loader and the command's overrides;
            Hydra's own list takes two seconds and ignores folders that overrides add.

    Raises:
        UnsupportedHydraError: if this version of Hydra runs jobs in another way.
    """
    from hydra._internal import hydra, utils
    from hydra._internal.core_plugins import basic_launcher

    require(utils, "run_and_report", "func")
    utils.run_and_report = lambda func: func()
    for module in (hydra, basic_launcher):
        require(module, "run_job")
        module.run_job = run_job  # type: ignore[attr-defined]
    require(hydra.Hydra, "format_config_groups", "self", "predicate", "compact")
    hydra.Hydra.format_config_groups = (  # type: ignore[method-assign]
        lambda self, predicate, compact=True: (
            list_groups(self.config_loader, getattr(self, "overrides_of_help", ())) if predicate("data") else ""
        )
    )
