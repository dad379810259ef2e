"""Cache of compositions, keyed by the chosen options; overrides of values are applied to a copy."""

import itertools
import os
import pickle
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from hydra.version import getbase
from omegaconf import DictConfig, open_dict

from foundry.config.composition import hydra_internals
from foundry.config.composition.hydra_internals import CachingConfigRepository, apply_overrides
from foundry.config.composition.hydra_versions import record_override_dirname

_SEARCHPATH = "hydra.searchpath"


class Choices:
    """Cache of composed configurations without value overrides, keyed by the chosen options.

    Reading and merging options takes most of the time of a composition. From the second composition on, options are
    read and merged once for all compositions that choose the same options. Overrides of values are then applied to a
    copy, as Hydra does in its last step. Compositions that choose different options share the option files in memory.

    Args:
        pickled: mapping that stores the compositions, e.g. one that several processes share; None for a new dict. A key
            is a tuple of strings, tuples and None with the same `repr` in each process.
    """

    def __init__(self, pickled: MutableMapping[tuple[object, ...], tuple[str, bytes]] | None = None) -> None:
        self._num_composed = 0
        self._pickled = {} if pickled is None else pickled
        self._files: dict[tuple[object, ...], bytes] = {}
        self._repositories: dict[tuple[object, ...], tuple[CachingConfigRepository, Exception | None]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use this cache for all compositions within the context. Option files must not change meanwhile."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def compose(
        self,
        load: Callable[[list[str]], DictConfig],
        loader: ConfigLoader,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
    ) -> DictConfig:
        """Return the configuration that `load` composes from the overrides. The caller may modify it."""
        self._num_composed += 1
        if self._num_composed == 1:
            return load(overrides)
        parsed = OverridesParser.create().parse_overrides(overrides)
        repository, error = self.open(loader, config_name, parsed)
        if error is not None or any(o.is_sweep_override() or o.key_or_group == _SEARCHPATH for o in parsed):
            return load(overrides)
        is_value = [isinstance(o.value(), dict) or not repository.group_exists(o.key_or_group) for o in parsed]
        choice_lines = [line for line, sets_value in zip(overrides, is_value, strict=True) if not sets_value]
        name = JobRuntime.instance().get("name")
        key = (_sources(loader), config_name, run_mode, getbase(), *choice_lines)
        if key not in self._pickled:
            self._pickled[key] = name, pickle.dumps(load(choice_lines))
        name_then, pickled = self._pickled[key]
        config = pickle.loads(pickled)
        assert isinstance(config, DictConfig)
        if config.hydra.job._get_node("name")._value() == name_then:
            config.hydra.job.name = name
        apply_overrides(list(itertools.compress(parsed, is_value)), config)
        _record(parsed, config)
        return config

    def open(
        self, loader: ConfigLoader, config_name: str | None, overrides: Sequence[Override]
    ) -> tuple[CachingConfigRepository, Exception | None]:
        """Return the result of `hydra_internals.open_repository`, cached by search path."""
        folders = [override.input_line for override in overrides if override.key_or_group == _SEARCHPATH]
        key = (_sources(loader), config_name, *folders)
        if key not in self._repositories:
            self._repositories[key] = hydra_internals.open_repository(loader, config_name, overrides)
        return self._repositories[key]


_current: ContextVar[Choices | None] = ContextVar("choices", default=None)


def current() -> Choices:
    """Return the cache of compositions that is currently in use, or a new cache if no cache is in use."""
    return _current.get() or Choices()


def current_files() -> dict[tuple[object, ...], bytes] | None:
    """Return the option files that the current cache has read; None without a cache or during its first composition."""
    choices = _current.get()
    return None if choices is None or choices._num_composed < 2 else choices._files


def keep_choices(choices: Choices | None = None) -> None:
    """Make all later compositions use this cache. None keeps the current cache, or makes one if none is in use."""
    _current.set(choices or current())


def compose_with(
    load: Callable[[list[str]], DictConfig],
    loader: ConfigLoader,
    config_name: str | None,
    overrides: list[str],
    run_mode: RunMode,
) -> DictConfig:
    """Compose overrides with `load`, using the current cache."""
    return current().compose(load, loader, config_name, overrides, run_mode)


def open_repository(
    loader: ConfigLoader, config_name: str | None, overrides: Sequence[Override]
) -> tuple[CachingConfigRepository, Exception | None]:
    """Return the repository of options of a loader, and the error about `hydra.searchpath` or None.

    The result is cached if a cache of compositions is in use.
    """
    return current().open(loader, config_name, overrides)


def _sources(loader: ConfigLoader) -> tuple[tuple[str, str], ...]:
    return tuple((source.provider, source.path) for source in loader.get_sources())


def _record(overrides: Sequence[Override], config: DictConfig) -> None:
    """Write the overrides, the working folder and copied environment variables into a configuration, as Hydra does."""
    task_overrides = [override for override in overrides if not override.is_hydra_override()]
    config.hydra.overrides.hydra = [override.input_line for override in overrides if override.is_hydra_override()]
    config.hydra.overrides.task = [override.input_line for override in task_overrides]
    config.hydra.runtime.cwd = str(Path.cwd())
    record_override_dirname(config, task_overrides)
    with open_dict(config.hydra):
        for name in config.hydra.job.env_copy:
            config.hydra.job.env_set[name] = os.environ[name]
