"""foundry: a Hydra-composed runner for training experiments.

`from foundry import compose, run` is a run from a script or a notebook. Parts have the names in
`foundry/core/part_names.py`, such as `foundry.GRPO`. All are imported when they are first used.
"""

from importlib import import_module

# Imported by their names, as the places below: rooms under `config` import this package for its version.
import_module("foundry.core.moved_modules").install()
_part_names = import_module("foundry.core.part_names")
_part_names.install()

__version__ = "0.1.0"

_PLACES = {
    "Config": "foundry.config.schemas.root",
    "ConfigError": "foundry.core.errors",
    "DataSplits": "foundry.data.splits",
    "Dataset": "foundry.data.dataset",
    "FrozenLauncher": "foundry.launch.launchers",
    "JobState": "foundry.launch.job_state",
    "Objective": "foundry.core.protocols",
    "Phase": "foundry.launch.job_state",
    "RunResult": "foundry.engine.train",
    "Stopped": "foundry.core.stopped",
    "Unreachable": "foundry.launch.job_state",
    "compose": "foundry.commands.library",
    "run": "foundry.commands.library",
}
__all__ = [
    *("Config", "ConfigError", "DataSplits", "Dataset", "FrozenLauncher", "JobState", "Objective", "Phase"),
    *("RunResult", "Stopped", "Unreachable", "compose", "run"),
]


def __getattr__(name: str) -> object:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    return _part_names.find_part(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_part_names.names_in(__name__)})
