"""foundry: a Hydra-composed runner for training experiments.

`from foundry import compose, run` is a run from a script or a notebook. Names are imported when they are
first used.
"""

from importlib import import_module

# Imported by its name, as the places below: rooms under `config` import this package for its version.
import_module("foundry.config.moved_modules").install()

__version__ = "0.1.0"

_PLACES = {
    "Config": "foundry.config.schemas.root",
    "ConfigError": "foundry.core.errors",
    "RunResult": "foundry.engine.train",
    "Stopped": "foundry.core.stopped",
    "compose": "foundry.commands.library",
    "run": "foundry.commands.library",
}
__all__ = ["Config", "ConfigError", "RunResult", "Stopped", "compose", "run"]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
