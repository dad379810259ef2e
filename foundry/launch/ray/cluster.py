"""Connection of `hydra/launcher=ray` to a cluster, and the check that its nodes can run the jobs."""

import contextlib
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foundry.config.packages import missing_message
from foundry.config.schemas.launcher import GROUP, PlacementStrategy, Ray
from foundry.core.errors import ConfigError, Violation, counted
from foundry.run_dir.redact import one_line

_ADDRESS = "hydra.launcher.address"
_CONNECT_SECONDS = 10.0
_LOCAL = "local"
_LOCAL_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Variables that Ray reads when it is imported: it reports nothing to its authors, and uses the loopback interface."""
_OBJECT_STORE_BYTES = 80 * 2**20
_REMEDY = "start a cluster with `ray start --head`, or set hydra.launcher.address=local"
_GIB = 2**30


def connect(settings: Ray) -> None:
    """Connect this process to a cluster, or start Ray on this machine; does nothing if this process is connected.

    Raises:
        ConfigError: Ray is not installed, no cluster responds, or the cluster has another version of Ray or Python.
    """
    if settings.address == _LOCAL:
        os.environ |= _LOCAL_VARIABLES
    try:
        import ray
    except ImportError:
        raise ConfigError(Violation(GROUP, f"is ray, which {missing_message('ray', 'ray')}")) from None
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"namespace": "foundry", "log_to_driver": False, "logging_level": "ERROR"}
    if settings.address == _LOCAL:
        options |= {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False}
        options["object_store_memory"] = _OBJECT_STORE_BYTES
        address = _LOCAL
    else:
        address = _find_address(settings)
        _check_answer(address)
    try:
        # Ray adds the current folder, which may belong to somebody else, to the import path of the actors.
        with contextlib.chdir(os.sep):
            ray.init(address=address, **options)
        # The death of a node is one line of the job. Ray would print that node's log among the states of the jobs.
        ray._private.worker._worker_logs_enabled = False
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        message = f"is {address}, but Ray refuses the connection: {one_line(str(error))}"
        raise ConfigError(Violation(_ADDRESS, message)) from None


def _find_address(settings: Ray) -> str:
    """Return HOST:PORT of the cluster: the setting, or RAY_ADDRESS, or the cluster that was started on this machine.

    Raises:
        ConfigError: no address is known, or the address is not HOST:PORT.
    """
    from ray._private.utils import read_ray_address

    key, address = _ADDRESS, settings.address
    if address is None and (address := os.environ.get("RAY_ADDRESS")):
        key = "environment variable RAY_ADDRESS"
    address = address or read_ray_address()
    if not address:
        message = f"has no value, RAY_ADDRESS is not set, and no cluster runs on this machine; {_REMEDY}"
        raise ConfigError(Violation(_ADDRESS, message))
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "//" in address:
        raise ConfigError(Violation(key, f"is {address}, which is not HOST:PORT; {_REMEDY}"))
    return address


def _check_answer(address: str) -> None:
    """Check that a cluster responds, in a few seconds; `ray.init` would try for minutes.

    Raises:
        ConfigError: it does not respond.
    """
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient

    try:
        resolved = str(canonicalize_bootstrap_address(address))  # Ray replaces a loopback address by the machine's own
        host, _, port = resolved.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS):
            pass
        GcsClient(address=resolved).internal_kv_get(b"foundry", namespace=None, timeout=_CONNECT_SECONDS)
    except Exception as error:  # Ray's own errors have no common class
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(str(error))
        message = f"is {address}, but no Ray cluster responds there: {reason}; {_REMEDY}"
        raise ConfigError(Violation(_ADDRESS, message)) from None


def bundle(settings: Ray) -> dict[str, float]:
    """Return the resources that a job reserves on each node, by Ray's names."""
    amounts: dict[str, float] = {"CPU": settings.cpus_per_task, "GPU": settings.gpus_per_task or 0}
    amounts |= settings.resources
    amounts = {name: amount * settings.tasks_per_node for name, amount in amounts.items() if amount}
    if settings.mem_gb is not None:
        amounts["memory"] = int(settings.mem_gb * _GIB)
    return amounts


def check_nodes(settings: Ray, nodes: Sequence[Mapping[str, float]], *, uses_gpu: bool) -> None:
    """Check that the nodes of a cluster can run a job when they are idle.

    Args:
        settings: settings of the launcher.
        nodes: resources of each node, by Ray's names.
        uses_gpu: whether the job trains on a GPU if it sees one.

    Raises:
        ConfigError: no node has the resources of a task, too few nodes have them, or the job would not see the GPUs.
    """
    if settings.gpus_per_task is None and uses_gpu and any(node.get("GPU") for node in nodes):
        message = "has no value, so Ray would hide the GPUs of the cluster; set it to 1, or to 0 for the CPU"
        raise ConfigError(Violation("hydra.launcher.gpus_per_task", message))
    if settings.autoscaling:
        return
    needs = bundle(settings)
    if violations := list(_missing_resources(settings, needs, nodes)):
        raise ConfigError(violations)
    fits = [
        math.floor(min((node.get(name, 0) / amount for name, amount in needs.items()), default=math.inf))
        for node in nodes
    ]
    if settings.strategy is PlacementStrategy.STRICT_SPREAD:
        possible = sum(fit >= 1 for fit in fits)
    elif settings.strategy is PlacementStrategy.STRICT_PACK:
        possible = max(fits, default=0)
    else:
        possible = sum(fits)
    if possible < settings.nodes:
        amounts = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
        message = f"is {settings.nodes} but the cluster has room for {possible} at a time, with {amounts} each"
        remedy = "lower it, or set hydra.launcher.autoscaling=true if the cluster adds nodes on demand"
        raise ConfigError(Violation("hydra.launcher.nodes", f"{message}; {remedy}"))


def _missing_resources(
    settings: Ray, needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> Iterator[Violation]:
    """Yield a violation for each resource if no node has the amount that a job reserves on a node."""
    keys = {"CPU": "cpus_per_task", "GPU": "gpus_per_task", "memory": "mem_gb"}
    for name, amount in needs.items():
        largest = max((node.get(name, 0) for node in nodes), default=0)
        if amount <= largest:
            continue
        key = keys.get(name, f"resources.{name}")
        if name == "memory":
            text, available = f"is {amount / _GIB:g}", f"{largest / _GIB:.4g} GB of memory"
        else:
            noun = {"CPU": "core", "GPU": "GPU"}.get(name, "unit")
            tasks = f" x tasks_per_node={settings.tasks_per_node}" if settings.tasks_per_node > 1 else ""
            text, available = f"is {amount / settings.tasks_per_node:g}{tasks}", _amount_text(largest, noun)
        remedy = "lower it, or set hydra.launcher.autoscaling=true if the cluster adds nodes on demand"
        yield Violation(f"hydra.launcher.{key}", f"{text} but no node has more than {available}; {remedy}")


def _amount_text(amount: float, noun: str) -> str:
    return counted(int(amount), noun) if amount == int(amount) else f"{amount:g} {noun}s"
