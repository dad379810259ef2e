"""`hparams_search=optuna_tpe`: hydra-optuna-sweeper, where it is installed."""

from importlib import import_module
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from foundry.config.errors import ConfigError, Violation


class OptunaSweeper(Sweeper):
    """Passes everything on to the plugin; each trial is checked as Optuna proposes it.

    Hydra would say of a plugin that is missing only that there is no such option.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra knows.

        Raises:
            ConfigError: the plugin is not installed.
        """
        try:
            plugin = import_module("hydra_plugins.hydra_optuna_sweeper.optuna_sweeper").OptunaSweeper
        except ImportError:
            message = "needs hydra-optuna-sweeper, which is not installed; pip install 'foundry[search]'"
            raise ConfigError(Violation("hparams_search", message)) from None
        from hydra.utils import instantiate

        self._plugin = instantiate(OmegaConf.create(self._settings), _target_=plugin, _convert_="object")
        self._plugin.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the trials, one batch after another."""
        return self._plugin.sweep(arguments)
