"""Registration of foundry's sweepers and launchers in Hydra, with lazy imports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.hydra_application import register_plugin
from foundry.config.schemas.launcher import SUBMITIT_PLUGIN, is_own
from foundry.config.schemas.launcher_base import PLUGINS
from foundry.core.errors import ConfigError, Violation, counted, format_reason

if TYPE_CHECKING:
    from foundry.launch.launchers import FrozenLauncher
    from foundry.sweeps.sweeper import CheckedSweeper

_TARGET = "hydra.launcher._target_"


def register() -> None:
    """Register the names that the schemas of `hydra/sweeper` and `hydra/launcher` use as `_target_`.

    The launchers of hydra-submitit-launcher compose a job again in each of its tasks, from the YAML files at that time,
    and each task would claim the run directory. Therefore foundry's own launchers replace these launchers; they also
    use submitit.
    """
    register_plugin(f"{PLUGINS}.GridSweeper", build_grid_sweeper)
    register_plugin(f"{PLUGINS}.OptunaSweeper", build_optuna_sweeper)
    register_plugin(f"{PLUGINS}.SequentialLauncher", build_sequential_launcher)
    register_plugin(f"{PLUGINS}.LocalLauncher", build_local_launcher)
    register_plugin(f"{PLUGINS}.SlurmLauncher", build_slurm_launcher)
    register_plugin(f"{PLUGINS}.RayLauncher", build_ray_launcher)
    register_plugin(f"{PLUGINS}.KubernetesLauncher", build_kubernetes_launcher)
    register_plugin(f"{SUBMITIT_PLUGIN}.SlurmLauncher", build_slurm_launcher)
    register_plugin(f"{SUBMITIT_PLUGIN}.LocalLauncher", build_submitit_local_launcher)


def build_launcher(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Launcher:
    """Build and set up the launcher of a sweep: one that is registered in Hydra, or a user's own class.

    Hydra refuses a class outside of its packages of plugins.

    Raises:
        ConfigError: the user's own class cannot be imported or is not a launcher.
    """
    if not is_own(config.hydra.launcher):
        return Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
    from foundry.config.checks.targets import check_own_launcher
    from foundry.launch.launchers import FrozenLauncher
    from foundry.sweeps.worker import work

    if violations := list(check_own_launcher(config)):
        raise ConfigError(violations)
    settings = cast(dict[str, Any], OmegaConf.to_container(config.hydra.launcher, resolve=True))
    target = settings.pop("_target_")
    module, _, name = target.rpartition(".")
    try:
        launcher_class = getattr(import_module(module), name)
    except Exception as error:
        message = f"is {target}, which cannot be imported: {format_reason(error)}"
        raise ConfigError(Violation(_TARGET, message)) from error
    if not (isinstance(launcher_class, type) and issubclass(launcher_class, FrozenLauncher)):
        raise ConfigError(Violation(_TARGET, f"is {target} but must be a subclass of foundry.FrozenLauncher"))
    if methods := sorted(launcher_class.__abstractmethods__):
        raise ConfigError(
            Violation(_TARGET, f"is {target}, which lacks {counted(len(methods), 'method')}: {', '.join(methods)}")
        )
    launcher = launcher_class(work=work, **settings)
    launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
    return launcher


# Hydra imports these functions by their names, so partial objects cannot replace them.


def build_grid_sweeper(**settings: Any) -> "CheckedSweeper":
    """Build the sweeper of `hydra/sweeper=foundry`."""
    from foundry.sweeps.sweeper import GridSweeper

    return GridSweeper(**settings)


def build_optuna_sweeper(**settings: Any) -> "CheckedSweeper":
    """Build the sweeper of `hydra/sweeper=optuna`."""
    from foundry.sweeps.search.sweeper import OptunaSweeper

    return OptunaSweeper(**settings)


def build_sequential_launcher(**settings: Any) -> "FrozenLauncher":
    """Build the launcher of `hydra/launcher=sequential`."""
    from foundry.launch.sequential import SequentialLauncher
    from foundry.sweeps.worker import work

    return SequentialLauncher(work, **settings)


def build_local_launcher(**settings: Any) -> "FrozenLauncher":
    """Build the launcher of `hydra/launcher=local`."""
    from foundry.launch.local_launcher import LocalLauncher
    from foundry.sweeps.worker import work

    return LocalLauncher(work, **settings)


def build_slurm_launcher(**settings: Any) -> "FrozenLauncher":
    """Build the launcher of `hydra/launcher=slurm` or `submitit_slurm`."""
    from foundry.launch.slurm.launcher import SlurmLauncher
    from foundry.sweeps.worker import work

    return SlurmLauncher(work, **settings)


def build_ray_launcher(**settings: Any) -> "FrozenLauncher":
    """Build the launcher of `hydra/launcher=ray`."""
    from foundry.launch.ray.launcher import RayLauncher
    from foundry.sweeps.worker import work

    return RayLauncher(work, **settings)


def build_kubernetes_launcher(**settings: Any) -> "FrozenLauncher":
    """Build the launcher of `hydra/launcher=kubernetes`."""
    from foundry.launch.kubernetes.launcher import KubernetesLauncher
    from foundry.sweeps.worker import work

    return KubernetesLauncher(work, **settings)


def build_submitit_local_launcher(**settings: Any) -> "FrozenLauncher":
    """Build the launcher of `hydra/launcher=submitit_local`."""
    from foundry.launch.submitit_local_launcher import SubmititLocalLauncher
    from foundry.sweeps.worker import work

    return SubmititLocalLauncher(work, **settings)
