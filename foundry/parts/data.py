"""Builders of the data and of the simulator that data may need."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from foundry.config.build import build, check_methods, field_of
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation
from foundry.core.simulator import Simulator
from foundry.data.splits import DataSplits
from foundry.parts.fitting import fitting


def build_data(config: Config) -> DataSplits:
    """Build the training and validation samples.

    Raises:
        ConfigError: the data is no `DataSplits`.
    """
    data = build(fitting(config.data, "data"), optional=offered_to_data(config.simulator), seed=config.hparams.seed)
    if not isinstance(data, DataSplits):
        message = f"returns an object of type {type(data).__name__} but must return foundry.DataSplits"
        raise ConfigError(Violation("data._target_", message))
    return data


def offered_to_data(simulator: Any) -> dict[str, Any]:
    """Return optional arguments of data: a factory of the simulator, and the settings of the group `simulator`."""
    return {"simulator": simulator_factory(simulator), "simulator_settings": _simulator_settings(simulator)}


def build_simulator(node: Any) -> Simulator | None:
    """Build the simulator of the group `simulator`; return None if the group is empty.

    Raises:
        ConfigError: the simulator cannot be built, lacks a method of `Simulator`, or has another `state_dim` or
            `action_dim` than its settings.
    """
    if field_of(node, "_target_") is None:
        return None
    settings = _simulator_settings(node)
    simulator: Simulator = build(fitting(settings, "simulator"))
    check_methods(simulator, Simulator, "simulator._target_")
    stated = {name: settings.get(name) for name in ("state_dim", "action_dim")}
    built = {name: getattr(simulator, name) for name in stated}
    if wrong := [name for name, size in stated.items() if size not in (None, built[name])]:
        simulator.close()
        message = f"but {type(simulator).__name__} has %s; set it to that"
        raise ConfigError(
            Violation(f"simulator.{name}", f"is {stated[name]} {message % built[name]}") for name in wrong
        )
    return simulator


def _simulator_settings(node: Any) -> dict[str, Any]:
    return node if isinstance(node, dict) else asdict(node)


def simulator_factory(node: Any) -> Callable[[], Simulator] | None:
    """Return a function that builds a new simulator at each call; None if the group `simulator` is empty."""

    def make() -> Simulator:
        simulator = build_simulator(node)
        assert simulator is not None
        return simulator

    return None if field_of(node, "_target_") is None else make


def samples_per_epoch(objective: Any, data: DataSplits) -> int:
    """Return the number of samples in one pass over the training data: rows times the objective's samples per row."""
    return len(data.train) * int(field_of(objective, "samples_per_row", 1))
