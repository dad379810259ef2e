"""Everything that foundry uses of Hydra beyond its documented interface; each access is tested by name.

A Hydra that lacks one of these, or has it with other parameters, is refused with its version.
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
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigNode, ConfigStore
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
"""The versions of hydra-core that setup.cfg allows."""

Load = Callable[..., DictConfig]
"""`load(loader, config_name, overrides, run_mode, compose)`, where `compose(overrides)` is what Hydra would do."""

_LOAD = ("self", "config_name", "overrides", "run_mode", "from_shell", "validate_sweep_overrides")


class UnsupportedHydraError(HydraException):
    """The installed Hydra is not one that foundry knows."""

    def __init__(self, what: str) -> None:
        from importlib.metadata import version

        super().__init__(f"hydra-core {version('hydra-core')} {what}; install hydra-core{SUPPORTED}")


def require(owner: Any, name: str, *parameters: str) -> Any:
    """A function or class of Hydra's, by the name of an attribute.

    Args:
        owner: the module or class that has it.
        name: of the attribute.
        parameters: their names, in order; none: they are not looked at.

    Raises:
        UnsupportedHydraError: there is none, or it takes other parameters.
    """
    found = getattr(owner, name, None)
    path = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    if found is None:
        raise UnsupportedHydraError(f"has no {path}")
    if parameters and (has := tuple(inspect.signature(inspect.unwrap(found)).parameters)) != parameters:
        raise UnsupportedHydraError(f"takes {', '.join(has)} in {path}, not {', '.join(parameters)}")
    return found


Compose = Callable[[Callable[[list[str]], DictConfig], ConfigLoader, str | None, list[str], RunMode], DictConfig]
"""`compose(load, loader, config_name, overrides, run_mode)`, where `load(overrides)` is Hydra's composition."""


def wrap_loading(load: Load, compose_with: Compose) -> None:
    """Have every composition go through `load`; calling it again changes nothing.

    Args:
        load: composes, checks the result and explains errors.
        compose_with: composes overrides with Hydra's function.

    Raises:
        UnsupportedHydraError: this Hydra composes in another way.
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
            if run_mode is RunMode.RUN and (known := _known.pop((config_name, *overrides), None)) is not None:
                return known
            return compose_with(load_all, self, config_name, overrides, run_mode)

        return load(self, config_name, overrides, run_mode, compose)

    ConfigLoaderImpl._load_configuration_impl = wrapped  # type: ignore[method-assign]


@dataclass(frozen=True)
class Chosen:
    """The options that a composition has chosen, before their values are merged.

    Attributes:
        repo: the folders of options.
        options: the chosen option of each group.
        chosen_by: the path of the file that overrides a group, such as `hparams/llm`; None for the command line. Groups
            at their default are left out.
    """

    repo: IConfigRepository
    options: Mapping[str, str | None]
    chosen_by: Mapping[str, str | None]


def wrap_choosing(bring: Callable[[Chosen], Mapping[str, str]]) -> None:
    """Have options bring options of other groups, in every composition; calling it again changes nothing.

    Args:
        bring: returns the options that others bring, by group.

    Raises:
        UnsupportedHydraError: this Hydra chooses options in another way.
    """
    from hydra._internal import config_loader_impl

    names = ("repo", "config_name", "overrides_list", "prepend_hydra", "skip_missing")
    original = require(config_loader_impl, "create_defaults_list", *names)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create(repo: Any, config_name: Any, overrides_list: list[Override], **kwargs: Any) -> Any:
        listed = original(repo, config_name, overrides_list, **kwargs)
        state = listed.overrides
        by = {key: meta.containing_config_path for key, meta in state.override_metadata.items()}
        brought = bring(Chosen(repo, state.known_choices, by | dict.fromkeys(state.deletions)))
        if not brought:
            return listed
        more = OverridesParser.create().parse_overrides([f"{group}={option}" for group, option in brought.items()])
        return original(repo, config_name, [*overrides_list, *more], **kwargs)

    setattr(config_loader_impl, "create_defaults_list", create)  # noqa: B010 - not exported, says mypy


_RUN = "hydra.mode=RUN"
_known: dict[tuple[str | None, ...], DictConfig] = {}
"""What `compose_once` has composed, by the configuration's name and the overrides, until it is asked for."""


def compose_once(compose_with: Compose) -> None:
    """Have a run's configuration composed once; calling it again changes nothing.

    Hydra composes one before, of which it reads `hydra.mode` only. That one is composed as for a run here, and kept for
    it unless it turns out to be a sweep.

    Args:
        compose_with: composes overrides with Hydra's function.

    Raises:
        UnsupportedHydraError: this Hydra asks for the mode in another way.
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
        except Exception:  # a sweep perhaps; if it is a run, composing it again says what is wrong
            return original(self, config_name, overrides)
        if mode is None:  # Hydra adds this override for a run
            composed.hydra.mode = RunMode.RUN
            composed.hydra.overrides.hydra.append(_RUN)
            _known.clear()  # one that nobody has asked for may be out of date
            _known[(config_name, *overrides, _RUN)] = composed
        return mode

    hydra.Hydra.get_mode = get_mode  # type: ignore[method-assign]


class _LazyNode(ConfigNode):
    """A schema in Hydra's store that becomes a node when it is loaded, of which a run loads a fifth.

    Hydra copies its store for each configuration that it composes; a schema is not copied. From the second load on, its
    node is unpickled, in a tenth of the time of making it or less.
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
    """Store a schema in Hydra's `ConfigStore` as its `store()` does, but make its node only when it is loaded.

    Raises:
        UnsupportedHydraError: this Hydra keeps schemas in another way.
    """
    store: Any = require(ConfigStore.instance(), "repo")
    require(ConfigNode, "__init__", "self", "name", "node", "group", "package", "provider")
    for folder in () if group is None else group.split("/"):
        store = store.setdefault(folder, {})
    store[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", group, make)


def cache_interpolations() -> None:
    """Have OmegaConf parse an interpolation once, not wherever it is resolved: a third of what composing jobs takes."""
    if not hasattr(parse := require(omegaconf.base, "parse", "value", "parser_rule", "lexer_mode"), "cache_info"):
        omegaconf.base.parse = functools.lru_cache(4096)(parse)  # type: ignore[attr-defined]


def load_unchecked(loader: ConfigLoader, config_name: str | None, overrides: list[str]) -> DictConfig:
    """What overrides compose to for a run, without what `wrap_loading` has added."""
    load = inspect.unwrap(require(ConfigLoaderImpl, "_load_configuration_impl", *_LOAD))
    composed: DictConfig = load(loader, config_name, overrides, RunMode.RUN)
    return composed


def open_repository(
    loader: ConfigLoader, config_name: str | None, overrides: Sequence[Override]
) -> tuple[CachingConfigRepository, Exception | None]:
    """Where a loader finds options, `hydra.searchpath` included, and what is wrong with the latter."""
    names = ("self", "config_name", "parsed_overrides", "repo")
    add_search_path = require(ConfigLoaderImpl, "_process_config_searchpath", *names)
    repository = CachingConfigRepository(require_loader(loader).repository)
    try:
        add_search_path(loader, config_name, list(overrides), repository)
    except Exception as error:  # whatever Hydra, OmegaConf or a file system says of such a folder
        return repository, error
    return repository, None


Edit = Callable[[str, ConfigResult], ConfigResult]
"""`edit(path, loaded)`: a file of options, by its path without `.yaml`, as a composition shall take it."""


@contextmanager
def edited_files(loader: ConfigLoaderImpl, edit_defaults: Edit, edit_content: Edit) -> Iterator[None]:
    """Have a loader take each file as two functions return it.

    Args:
        loader: Hydra's.
        edit_defaults: called with a file as it is read, before its list of defaults is followed.
        edit_content: called with a file whose keys begin at the root, in the order in which they are merged.

    Raises:
        UnsupportedHydraError: this Hydra loads files in another way.
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

    own = vars(loader)
    own.update(_parse_overrides_and_create_caching_repo=parse_and_open, _load_single_config=load_single)
    try:
        yield
    finally:
        del own["_parse_overrides_and_create_caching_repo"], own["_load_single_config"]


def answer_long_names() -> None:
    """Have Hydra find no group and no option by a name that no file can have; calling it again changes nothing.

    Hydra asks the file system for each key and each value of the command line, and passes on the OSError of its answer.
    """
    Plugins.instance()  # registers the sources, whose modules it loads anew
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
    """Hydra's own loader.

    Raises:
        UnsupportedHydraError: it is another.
    """
    if not isinstance(loader, ConfigLoaderImpl):
        raise UnsupportedHydraError(f"composes with a {type(loader).__name__}")
    return loader


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Change a composed configuration by overrides of its values, as Hydra does it."""
    require(ConfigLoaderImpl, "_apply_overrides_to_config", "overrides", "cfg")(list(overrides), config)


def override_dirname(overrides: Sequence[Override], config: DictConfig) -> str:
    """`hydra.job.override_dirname` of a job with these overrides."""
    from hydra._internal import config_loader_impl

    make = require(config_loader_impl, "get_overrides_dirname", "overrides", "exclude_keys", "item_sep", "kv_sep")
    options = config.hydra.job.config.override_dirname
    return str(make(list(overrides), options.exclude_keys, options.item_sep, options.kv_sep))


def search_path(folder: str) -> ConfigSearchPath:
    """Where Hydra looks for options, a folder first."""
    from hydra._internal import utils

    made: ConfigSearchPath = require(utils, "create_config_search_path", "search_path_dir")(folder)
    return made


@contextmanager
def current_config(composed: DictConfig) -> Iterator[None]:
    """Have `${hydra:...}` mean a configuration's own values; `HydraConfig.set_config` would copy it.

    Raises:
        UnsupportedHydraError: this Hydra keeps its configuration elsewhere.
    """
    state = HydraConfig.instance()
    if "cfg" not in vars(state):
        raise UnsupportedHydraError("has no HydraConfig.cfg")
    before = state.cfg
    state.cfg = cast(Any, composed)
    try:
        yield
    finally:
        state.cfg = before


def register_plugin(name: str, make: Callable[..., Plugin]) -> None:
    """Have Hydra make a sweeper or launcher of a name with a callable.

    Hydra looks into its plugins' package only, and `Plugins.register` would use the name of the class's own module,
    which Hydra then refuses to instantiate.

    Raises:
        UnsupportedHydraError: this Hydra keeps its plugins elsewhere.
    """
    require(Plugins.instance(), "class_name_to_class")[name] = make


def error_of(result: JobReturn) -> BaseException | None:
    """What a job raised; the property `return_value` would raise it."""
    if result.status is not JobStatus.FAILED:
        return None
    error = require(result, "_return_value")
    return error if isinstance(error, BaseException) else None


def write_help(
    own: str, write_page: Callable[[ConfigLoader], str], write_sweep_page: Callable[[ConfigLoader], str]
) -> None:
    """Have `--help` alone print a page that is made without composing anything, which Hydra's takes half its time for.

    With overrides, or another configuration, the page is Hydra's: what is chosen may change it.

    Args:
        own: the name of the primary configuration whose page it is.
        write_page: makes the page.
        write_sweep_page: makes that of `-m`.

    Raises:
        UnsupportedHydraError: this Hydra writes its page in another way.
    """
    from hydra._internal import hydra

    original = inspect.unwrap(require(hydra.Hydra, "app_help", "self", "config_name", "args_parser", "args"))

    @functools.wraps(original)
    def app_help(self: Any, config_name: str | None, args_parser: Any, args: Any) -> None:
        if config_name == own and args.multirun:
            sys.stdout.write(f"{write_sweep_page(self.config_loader)}\n")
        elif config_name != own or args.overrides or args.config_dir or args.config_path:
            self.overrides_of_help = list(args.overrides)  # they may name further folders of options
            original(self, config_name, args_parser, args)
        else:
            sys.stdout.write(f"{write_page(self.config_loader)}\n")

    hydra.Hydra.app_help = app_help  # type: ignore[method-assign]


def take_over(run_job: Callable[..., JobReturn], list_groups: Callable[[ConfigLoader, Sequence[str]], str]) -> None:
    """Run jobs with `run_job`, and have errors come out of `hydra.main` as they are.

    Hydra would print a config error with its own remarks and leave with 1, and shorten the traceback of real failures.

    Args:
        run_job: in place of Hydra's own, which makes the directory and writes there before the task begins.
        list_groups: what the page of `--help` says of the groups, given its overrides; Hydra's own list takes two
            seconds, and knows no folders that overrides name.

    Raises:
        UnsupportedHydraError: this Hydra runs jobs in another way.
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
