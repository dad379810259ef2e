"""Checks that make Hydra reject an invalid configuration while composing it.

Hydra has no hook between composing a configuration and using it, so one method of its loader is wrapped. Every
composition by the loader then rejects an invalid configuration: for a run, for `--cfg job`, and by `compose()` in a
test. foundry's sweepers bypass the wrapper and check each job themselves. Configurations without foundry's schemas
belong to other applications and are not checked. See hydra-core issues 981 and 2193; the wrapper can be removed when
Hydra has this hook.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.choices import compose_with, current, current_files
from foundry.config.composition.hydra_internals import (
    ConfigLoaderImpl,
    cache_interpolations,
    cache_option_files,
    ignore_long_names,
    skip_unused_choices,
    wrap_choosing,
    wrap_loading,
)
from foundry.config.composition.implied_options import implied_options
from foundry.config.composition.resolvers import register_resolvers
from foundry.config.composition.start_dir import anchor_paths, check_folders, check_start_dir
from foundry.config.composition.store import register_schemas
from foundry.config.record.secrets import check_overrides, check_secrets
from foundry.config.schemas.root import Config
from foundry.config.target_names import use_public_names
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.core.tasks import installed_tasks

CONFIG_NAME = "config"
_NO_SCHEMAS = (
    "which does not include foundry's schemas; write `defaults: [config, _self_]` at its top and your changes below"
)


def config_dir() -> str:
    """Return the folder of the configuration groups: in the installed package, or next to it in a source checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "conf"
    return str(installed if installed.is_dir() else package.parent / "conf")


class _OptionFolders(SearchPathPlugin):
    """Plugin that appends foundry's option folder, if it is missing, and those of tasks to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder_url = f"file://{config_dir()}"
        if not {folder_url, config_dir()} & {element.path for element in search_path.get_path()}:
            search_path.append("foundry", folder_url)
        add_options_of_tasks(search_path)


def add_options_of_tasks(search_path: ConfigSearchPath) -> None:
    """Append the option folders of installed tasks to the search path. Options in earlier folders take precedence."""
    for task in installed_tasks():
        if task.config_dir is not None:
            search_path.append(f"foundry.tasks.{task.name}", f"file://{task.config_dir}")


def install(*, is_only_application: bool = False) -> None:
    """Register schemas and resolvers, and wrap Hydra's loader. Idempotent.

    Args:
        is_only_application: no other Hydra application runs in this process, so a configuration without foundry's
            schemas is an error.

    Raises:
        UnsupportedHydraError: if the installed version of Hydra is not supported.
    """
    register_schemas()
    register_resolvers()
    if is_only_application:
        _process.is_only_application = True
        Plugins.instance().register(_OptionFolders)
    wrap_loading(_load, compose_with)
    wrap_choosing(implied_options)
    ignore_long_names()
    cache_interpolations()
    cache_option_files(current_files)
    skip_unused_choices()


@dataclass
class _Process:
    is_only_application: bool = False


_process = _Process()


def _load(
    loader: ConfigLoaderImpl,
    config_name: str | None,
    overrides: list[str],
    run_mode: RunMode,
    compose: Callable[[list[str]], DictConfig],
) -> DictConfig:
    """Compose with Hydra's `compose`, and reject an invalid configuration of foundry.

    Configurations of other Hydra applications are not checked.

    Raises:
        ConfigError: if the configuration is invalid; contains all errors.
    """

    def compose_named(overrides: list[str]) -> DictConfig:
        config = compose(overrides)
        if OmegaConf.get_type(config) is Config:
            use_public_names(config)
        return config

    with current().used():
        return _compose_checked(loader, config_name, overrides, run_mode, compose_named)


def _compose_checked(
    loader: ConfigLoaderImpl,
    config_name: str | None,
    overrides: list[str],
    run_mode: RunMode,
    compose: Callable[[list[str]], DictConfig],
) -> DictConfig:
    from foundry.config.checks.check import check  # imports all rules, which the page of `--help` does not need
    from foundry.config.diagnostics.missing_values import check_hydra
    from foundry.config.diagnostics.override_errors import includes_schemas

    check_start_dir()
    try:
        config = compose(overrides)
    except Exception as error:  # raised by Hydra, OmegaConf, YAML, ANTLR, or by bugs in these
        if config_name is None or not (
            _process.is_only_application or includes_schemas(loader, config_name, overrides)
        ):
            raise
        _note_secrets(overrides, run_mode)
        config = _repair(loader, config_name, overrides, run_mode, compose, error)
    if config_name is None or OmegaConf.get_type(config) is not Config:
        if config_name is not None and _process.is_only_application:
            raise ConfigError(Violation("--config-name", f"is {as_text(config_name)}, {_NO_SCHEMAS}"))
        return config
    _note_secrets(overrides, run_mode)
    # A sweep's master configuration leaves swept keys at their defaults; each job is checked when it is composed. The
    # master configuration is written to disk, so it is checked for secrets, and otherwise only for wrong `hydra`
    # settings and folders.
    if (
        violations := check(config)
        if run_mode is RunMode.RUN
        else [*check_secrets(config), *check_hydra(config), *check_folders(config)]
    ):
        raise ConfigError(violations)
    anchor_paths(config)
    return config


def _note_secrets(overrides: list[str], run_mode: RunMode) -> None:
    """Redact in all later output the secrets that the overrides contain.

    Raises:
        ConfigError: if the overrides of a sweep contain secrets, which would be written to its multirun.yaml.
    """
    secrets = list(check_overrides(overrides))
    if secrets and run_mode is not RunMode.RUN:
        raise ConfigError(secrets)


def _repair(
    loader: ConfigLoaderImpl,
    config_name: str,
    overrides: list[str],
    run_mode: RunMode,
    compose: Callable[[list[str]], DictConfig],
    error: Exception,
) -> DictConfig:
    """Repair a failed composition that is valid apart from Hydra's restrictions, or collect every error in it.

    The repairs: a null choice such as `debug=null` is written in Hydra's form, and the master configuration of a sweep
    is composed without the settings that only swept options have.

    Raises:
        ConfigError: if neither repair applies; contains all errors.
    """
    from foundry.config.diagnostics.override_errors import compose_sweep_master, find_errors, without_null_choices

    is_run = run_mode is RunMode.RUN
    repaired = without_null_choices(loader, config_name, overrides)
    if repaired != overrides:
        try:
            return compose(repaired)
        except Exception as second_error:
            overrides, error = repaired, second_error
    if not is_run and (master := compose_sweep_master(loader, config_name, compose, overrides)) is not None:
        return master
    raise ConfigError(find_errors(loader, config_name, compose, overrides, error, is_run=is_run)) from error
