"""Making Hydra refuse a wrong configuration while it composes it.

Hydra has no hook between composing a configuration and using it, so one method of its loader is wrapped. A wrong
configuration is then refused wherever it is composed: for a run, `--cfg job`, `compose()` in a test, and each job of a
sweep, before the first one starts. See hydra-core issues 981 and 2193; the wrapper can go when Hydra has such a hook.
"""

import functools
import inspect
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig

from foundry.config.errors import ConfigError
from foundry.config.mistakes import HYDRA_ERRORS, find_mistakes, master_over_options
from foundry.config.resolvers import register_resolvers
from foundry.config.rules import check
from foundry.config.secrets import check_secrets, check_words
from foundry.config.store import register_schemas

CONFIG_NAME = "config"

_PARAMETERS = ["self", "config_name", "overrides", "run_mode", "from_shell", "validate_sweep_overrides"]


def config_dir() -> str:
    """The folder of the configuration groups: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return str(installed if installed.is_dir() else package.parent / "conf")


def install() -> None:
    """Register schemas and resolvers, and wrap Hydra's loader. Calling it again changes nothing."""
    register_schemas()
    register_resolvers()
    original = ConfigLoaderImpl._load_configuration_impl
    if hasattr(original, "__wrapped__"):
        return
    found = list(inspect.signature(original).parameters)
    assert found == _PARAMETERS, f"this Hydra's loader takes {found}; foundry knows {_PARAMETERS}"

    @functools.wraps(original)
    def load(
        self: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        *args: Any,
        **kwargs: Any,
    ) -> DictConfig:
        def compose(overrides: list[str]) -> DictConfig:
            return original(self, config_name, overrides, run_mode, *args, **kwargs)

        if not _is_ours(self, config_name):
            return compose(overrides)
        secrets = list(check_words(overrides))  # first: no message below may show them
        if secrets and run_mode is not RunMode.RUN:
            raise ConfigError(secrets)  # multirun.yaml would have them
        try:
            config = compose(overrides)
        except HYDRA_ERRORS as error:
            whole = run_mode is RunMode.RUN
            if not whole and (master := master_over_options(self, config_name, compose, overrides)) is not None:
                return master
            raise ConfigError(find_mistakes(self, config_name, compose, overrides, error, whole=whole)) from error
        # A sweep's master configuration leaves swept keys at their defaults; each job is checked when it is composed.
        # But it is written down as it is.
        if violations := check(config) if run_mode is RunMode.RUN else list(check_secrets(config)):
            raise ConfigError(violations)
        return config

    ConfigLoaderImpl._load_configuration_impl = load  # type: ignore[method-assign]


def _is_ours(loader: ConfigLoaderImpl, config_name: str | None) -> bool:
    """Whether the configuration being composed is foundry's, and not another Hydra application's in this process."""
    own = Path(config_dir())
    return config_name == CONFIG_NAME and any(
        source.scheme() == "file" and Path(source.path) == own for source in loader.repository.get_sources()
    )
