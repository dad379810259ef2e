"""Rank and sizes of a process, and helpers that read them from environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from foundry.core.errors import ConfigError, Violation

DEFAULT_PORT = 29_500

Launcher = Literal["single", "torchrun", "submitit", "slurm", "mpi", "pytorchjob", "kubeflow", "sagemaker"]


@dataclass(frozen=True)
class LaunchEnvironment:
    """Rank and sizes of this process within its launch.

    Attributes:
        launcher: program that started the process. `kubeflow` and `sagemaker` start one process on each node, and
            foundry starts the ranks of the node; the other programs start every rank.
        rank: 0 ≤ rank < world_size, over all nodes; the first rank of this node if foundry starts its ranks.
        local_rank: 0 ≤ local_rank < local_world_size, on this node.
        world_size: number of ranks over all nodes.
        local_world_size: number of ranks on this node.
        num_nodes: number of machines.
        master_addr: host of rank 0.
        master_port: port that rank 0 listens on; the same for every rank, and again after a requeue.
    """

    launcher: Launcher
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT

    @property
    def starts_one_per_node(self) -> bool:
        """Whether the launcher starts one process on each node, so that foundry starts the ranks of the node."""
        return self.launcher in ("kubeflow", "sagemaker")

    def num_processes(self, nproc_per_node: int) -> int:
        """Return the number of processes that foundry starts on this node; 1 if it trains in this process.

        Args:
            nproc_per_node: value of `distributed.nproc_per_node`.
        """
        if self.starts_one_per_node:
            return self.local_world_size
        return nproc_per_node if self.launcher == "single" else 1


def integer(variables: Mapping[str, str], key: str, default: int | None = None) -> int:
    """Return an environment variable as an integer; `default` if it is not set or empty.

    Raises:
        ConfigError: it is not an integer, or it is not set and there is no default.
    """
    text = variables.get(key) or ""
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise variable_error(key, text, "is not an integer: unset it, or let the launcher set it") from None


def master(variables: Mapping[str, str], address: str, port: int) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT, or the given defaults.

    Raises:
        ConfigError: MASTER_PORT is not a port.
    """
    return variables.get("MASTER_ADDR") or address, read_port(variables, "MASTER_PORT", port)


def read_port(variables: Mapping[str, str], key: str, default: int) -> int:
    """Return an environment variable as a port; `default` if it is not set or empty.

    Raises:
        ConfigError: it is not an integer from 1 to 65535.
    """
    port = integer(variables, key, default)
    if not 0 < port < 2**16:
        raise variable_error(key, str(port), "is not a port, which is between 1 and 65535: unset it for the default")
    return port


def check_range(key: str, value: int, noun: str, size: int) -> None:
    """Check that 0 ≤ value < size.

    Raises:
        ConfigError: names the variable.
    """
    if not 0 <= value < size:
        raise variable_error(key, str(value), f"must be at least 0 and below {size}, the number of {noun}")


def require(variables: Mapping[str, str], engine: str, keys: tuple[str, ...], present: str) -> None:
    """Check that variables of an engine that belong together are all set.

    Args:
        variables: the environment.
        engine: name of the engine, for the message.
        keys: the variables.
        present: a variable that is set, for the message.

    Raises:
        ConfigError: names the variable that is missing.
    """
    for key in keys:
        if not variables.get(key):
            message = f"is set but {key} is not: set the variables of {engine} together, or unset {present}"
            raise variable_error(present, variables[present], message)


def variable_error(key: str, value: str, message: str) -> ConfigError:
    """Return the error of an environment variable."""
    return ConfigError(Violation(f"environment variable {key}", f"{value!r} {message}"))
