"""Messages between a command and the process of its rehearsal, as plain data. Nothing is pickled."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry.core.errors import ConfigError, Violation
from foundry.rehearsal.record import RehearsalRecord


class RehearsalError(RuntimeError):
    """Raised if a run fails in its rehearsal. The message contains the reason and, if there is one, the traceback."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for a rehearsal, as plain data.

    Attributes:
        config_dir: folder that contains config.yaml.
        run_dir: run directory of the rehearsed run.
        world_size: number of ranks.
        ranks_per_node: number of ranks on each node.
        device: short name of a GPU.
        steps: number of the last optimizer step.
    """

    config_dir: str
    run_dir: str
    world_size: int
    ranks_per_node: int
    device: str
    steps: int


def read_answer(content: Mapping[str, Any]) -> RehearsalRecord:
    """Return the record of a rehearsal from the answer of its process.

    Raises:
        ConfigError: if the process of the rehearsal raised one.
        RehearsalError: if the run failed.
    """
    if "violations" in content:
        raise ConfigError(Violation(key, message) for key, message in content["violations"])
    if "reason" in content:
        raise RehearsalError(f"the run failed in its rehearsal: {content['reason']}\n{content['traceback']}")
    return RehearsalRecord.from_json(content["rehearsed"])
