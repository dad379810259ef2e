"""Registration of foundry's sweepers and launchers in Hydra, with lazy imports."""

from typing import TYPE_CHECKING, Any

from foundry.config.composition.hydra_application import register_plugin
from foundry.config.schemas.launcher import PLUGINS, SUBMITIT_PLUGIN

if TYPE_CHECKING:
    from foundry.launch.launchers import FrozenLauncher
    from foundry.sweeps.sweeper import CheckedSweeper


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
    register_plugin(f"{SUBMITIT_PLUGIN}.SlurmLauncher", build_slurm_launcher)
    register_plugin(f"{SUBMITIT_PLUGIN}.LocalLauncher", build_submitit_local_launcher)


# Hydra imports these functions by their names, so partial objects cannot replace them.


def build_grid_sweeper(**settings: Any) -> "CheckedSweeper":
    """Build the sweeper of `hydra/sweeper=foundry`."""
    from foundry.sweeps.sweeper import GridSweeper

    return GridSweeper(**settings)


def build_optuna_sweeper(**settings: Any) -> "CheckedSweeper":
    """Build the sweeper of `hydra/sweeper=optuna`."""
    from foundry.sweeps.search import OptunaSweeper

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
    from foundry.launch.slurm_launcher import SlurmLauncher
    from foundry.sweeps.worker import work

    return SlurmLauncher(work, **settings)


def build_submitit_local_launcher(**settings: Any) -> "FrozenLauncher":
    """Build the launcher of `hydra/launcher=submitit_local`."""
    from foundry.launch.submitit_local_launcher import SubmititLocalLauncher
    from foundry.sweeps.worker import work

    return SubmititLocalLauncher(work, **settings)
