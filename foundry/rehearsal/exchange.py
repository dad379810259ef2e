"""Messages between a command and the process of its rehearsal: plain data, nothing is pickled."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry.core.errors import ConfigError, Violation
from foundry.rehearsal.rehearsed import Rehearsed


class RehearsalError(RuntimeError):
    """A run failed in its rehearsal; the message has the reason and the run's own traceback."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A rehearsal to be done; plain data.

    Attributes:
        config_dir: folder that holds config.yaml.
        run_dir: run directory of the rehearsed run.
        world_size: ranks.
        ranks_per_node: of them, on this rank's node.
        device: short name of a GPU.
        steps: at whose number the run ends.
        shortens: leave out evaluations and checkpoints but one small one.
    """

    config_dir: str
    run_dir: str
    world_size: int
    ranks_per_node: int
    device: str
    steps: int
    shortens: bool


def read_answer(content: Mapping[str, Any]) -> Rehearsed:
    """The record of a rehearsal, from the containers that its process has written.

    Raises:
        ConfigError: that process has raised it.
        RehearsalError: the run failed.
    """
    if "violations" in content:
        raise ConfigError(Violation(key, message) for key, message in content["violations"])
    if "reason" in content:
        raise RehearsalError(f"the run failed in its rehearsal: {content['reason']}\n{content['traceback']}")
    return Rehearsed.from_json(content["rehearsed"])
