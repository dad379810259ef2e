"""Uses of Hydra beyond its documented interface by commands and sweeps: plugins, jobs, errors and the help page."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.plugin import Plugin
from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.hydra_versions import (
    IS_1_3,
    UnsupportedHydraError,
    is_refused,
    log_targets,
    require,
    since_1_4,
)
from foundry.config.schemas.launcher_base import PLUGINS


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


def is_plugin(target: str) -> bool:
    """Return whether a name is that of a sweeper or launcher: of Hydra, of an installed plugin, or of foundry."""
    return target in require(Plugins.instance(), "class_name_to_class") or target.startswith(f"{PLUGINS}.")


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

    names = ("self", "config_name", "args_parser", "args", *since_1_4("parsed_overrides"))
    original = inspect.unwrap(require(hydra.Hydra, "app_help", *names))

    @functools.wraps(original)
    def app_help(self: Any, config_name: str | None, args_parser: Any, args: Any, **kwargs: Any) -> None:
        if config_name == primary_config and args.multirun:
            sys.stdout.write(f"{write_sweep_page(self.config_loader)}\n")
        elif config_name != primary_config or args.overrides or args.config_dir or args.config_path:
            self.overrides_of_help = list(args.overrides)  # may set hydra.searchpath, which adds folders of options
            original(self, config_name, args_parser, args, **kwargs)
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
    if not IS_1_3:
        _allow_log_handlers()
    require(hydra.Hydra, "format_config_groups", "self", "predicate", "compact")
    hydra.Hydra.format_config_groups = (  # type: ignore[method-assign]
        lambda self, predicate, compact=True: (
            list_groups(self.config_loader, getattr(self, "overrides_of_help", ())) if predicate("data") else ""
        )
    )


def _allow_log_handlers() -> None:
    """Allow Hydra 1.4 to call the functions in logging settings, except for those that Hydra 1.3 refuses too."""
    from hydra import utils as hydra_utils
    from hydra._internal import hydra
    from hydra.core import utils

    allow = require(hydra_utils, "execution_whitelist", "execution_whitelist", "reset")
    names = ("log_config", "verbose_config", "execution_whitelist")
    original = inspect.unwrap(require(utils, "configure_log", *names))

    @functools.wraps(original)
    def configure_log(
        log_config: DictConfig | None, verbose_config: Any = False, execution_whitelist: Any = None
    ) -> None:
        settings = {} if log_config is None else OmegaConf.to_container(log_config, resolve=True)
        allowed = [target for target in log_targets(settings) if not is_refused(target)]
        with allow(allowed):  # added to the list of the application
            original(log_config, verbose_config, execution_whitelist)

    for module in (hydra, utils):
        require(module, "configure_log")
        module.configure_log = configure_log  # type: ignore[attr-defined]
