"""Making foundry's sweepers and launchers known to Hydra."""

from typing import Any

from foundry.config.hydra_internals import register_plugin
from foundry.config.schemas.launcher import PLUGINS
from foundry.launch.local_launcher import LocalLauncher
from foundry.launch.sequential import SequentialLauncher
from foundry.launch.slurm_launcher import SlurmLauncher
from foundry.sweeps.search import OptunaSweeper
from foundry.sweeps.sweeper import GridSweeper
from foundry.sweeps.worker import work


def register() -> None:
    """Register the names that the schemas of `hydra/sweeper` and `hydra/launcher` have as `_target_`."""
    register_plugin(f"{PLUGINS}.GridSweeper", GridSweeper)
    register_plugin(f"{PLUGINS}.OptunaSweeper", OptunaSweeper)
    register_plugin(f"{PLUGINS}.SequentialLauncher", build_sequential_launcher)
    register_plugin(f"{PLUGINS}.LocalLauncher", build_local_launcher)
    register_plugin(f"{PLUGINS}.SlurmLauncher", build_slurm_launcher)


# Hydra imports what it calls by its name, so that a partial would not do.


def build_sequential_launcher(**settings: Any) -> SequentialLauncher:
    """A launcher of `hydra/launcher=sequential`."""
    return SequentialLauncher(work, **settings)


def build_local_launcher(**settings: Any) -> LocalLauncher:
    """A launcher of `hydra/launcher=local`."""
    return LocalLauncher(work, **settings)


def build_slurm_launcher(**settings: Any) -> SlurmLauncher:
    """A launcher of `hydra/launcher=slurm`."""
    return SlurmLauncher(work, **settings)
