"""Who started this process, and which one of how many it is.

The rule, first match wins:

1. `RANK` and `WORLD_SIZE` are set: torchrun, or anything that speaks its language (also inside a Slurm job).
2. submitit started it on this machine, as one of several tasks: `SUBMITIT_EXECUTOR=local`, with
   `SUBMITIT_LOCAL_GLOBALID` and `SUBMITIT_LOCAL_NTASKS`. They meet at a port that follows from the number of the job.
   A single task is one process, whatever started submitit itself.
3. The process is a task of a Slurm step: `SLURM_STEP_ID` names an ordinary step and `SLURM_PROCID` is set. Plain
   `srun`, `srun` inside `sbatch` or `salloc`, and submitit are all of this kind. The size is the step's, not the job's.
4. One process. That includes the batch script of `sbatch` and the shell of `salloc`: their environment says
   `SLURM_NTASKS=4` (and, in a batch script, `SLURM_PROCID=0`), yet nobody started the other three. Where the batch
   script, the interactive step or the extern step has a number, it is a reserved one and not an ordinary step's.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from foundry.core.errors import ConfigError, Violation

if TYPE_CHECKING:
    from foundry.config.schemas.distributed import Distributed

STORE = "FOUNDRY_STORE"
"""The variable by which processes that foundry starts on this machine know the file in which they meet."""

# slurm.h: SLURM_PENDING_STEP, SLURM_EXTERN_CONT, SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP, … are the top of 32 bits.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Below Linux's ephemeral range (32768-60999), so that no outgoing connection can hold the port.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
_DEFAULT_PORT = 29_500


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place among those started together.

    Attributes:
        launcher: who started it.
        rank: 0 ≤ rank < world_size, over all nodes.
        local_rank: 0 ≤ local_rank < local_world_size, on this node.
        world_size: processes over all nodes.
        local_world_size: processes on this node.
        num_nodes: machines.
        master_addr: host where rank 0 listens.
        master_port: its port; the same for every rank, and again after a requeue.
    """

    launcher: Literal["single", "torchrun", "submitit", "slurm"]
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    master_addr: str = "127.0.0.1"
    master_port: int = _DEFAULT_PORT


@dataclass(frozen=True)
class Launch:
    """How the run will be started, as far as composition can know.

    Attributes:
        environment: what torchrun or Slurm say, if one of them started this process.
        tasks: processes that a launcher starts for each job.
        distributed: what the run itself starts.
    """

    environment: LaunchEnvironment
    tasks: int
    distributed: "Distributed"

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        if self.environment.launcher != "single":
            return self.environment.world_size
        return self.tasks if self.tasks > 1 else self.distributed.nproc_per_node

    @property
    def dp_size(self) -> int:
        """Those that train on samples of their own."""
        return self.distributed.dp_size(self.world_size)


_SINGLE = LaunchEnvironment("single", 0, 0, 1, 1, 1)


def detect(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the launch from environment variables; the module says by which rule.

    Args:
        environ: the variables; this process's own by default.

    Raises:
        ConfigError: variables that are not integers, contradict each other, or are set only in part.
    """
    variables = os.environ if environ is None else environ
    if variables.get("RANK") or variables.get("WORLD_SIZE"):
        found, keys = _torchrun(variables), ("RANK", "LOCAL_RANK")
    elif is_local_submitit(variables):
        found, keys = _submitit(variables), ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID")
    elif _is_step_task(variables):
        found, keys = _slurm(variables), ("SLURM_PROCID", "SLURM_LOCALID")
    else:
        return _SINGLE
    _check_range(keys[0], found.rank, "processes", found.world_size)
    _check_range(keys[1], found.local_rank, "processes on this node", found.local_world_size)
    return found


def is_local_submitit(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is a task that submitit started on this machine, without a scheduler."""
    variables = os.environ if environ is None else environ
    return variables.get("SUBMITIT_EXECUTOR") == "local" and bool(variables.get("SUBMITIT_LOCAL_GLOBALID"))


@contextmanager
def default_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and unset them on leaving.

    To be entered in the main thread: changing the environment while another thread reads it is not safe.
    """
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list such as `node[001-004,7],x1`, in order.

    Raises:
        ConfigError: brackets that do not close or a range that is not one.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if ",".join(parts) != nodelist:
        raise _error("SLURM_JOB_NODELIST", nodelist, "is not a node list such as node[001-004,7],x1")
    return [host for part in parts for host in _expand_host(part, nodelist)]


def _expand_host(part: str, nodelist: str) -> Iterator[str]:
    """`a[1-2]b[3,4]` → a1b3 a1b4 a2b3 a2b4."""
    bracket = re.search(r"\[([^\]]*)\]", part)
    if bracket is None:
        yield part
        return
    for item in bracket[1].split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if span is None:
            raise _error("SLURM_JOB_NODELIST", nodelist, f"has a range {item!r} that is not like 001-004")
        first, last = span[1], span[2] or span[1]
        for number in range(int(first), int(last) + 1):
            yield from _expand_host(
                f"{part[: bracket.start()]}{number:0{len(first)}d}{part[bracket.end() :]}", nodelist
            )


def _torchrun(variables: Mapping[str, str]) -> LaunchEnvironment:
    for key in ("RANK", "WORLD_SIZE"):
        if not variables.get(key):
            other = "WORLD_SIZE" if key == "RANK" else "RANK"
            raise _error(other, variables[other], f"is set but {key} is not: start with torchrun, or unset it")
    world_size = _integer(variables, "WORLD_SIZE")
    if world_size > 1 and not variables.get("LOCAL_RANK"):
        remedy = "is set but LOCAL_RANK is not: set it (0 where each node runs one process), or start with torchrun"
        raise _error("RANK", variables["RANK"], remedy)
    local_rank = _integer(variables, "LOCAL_RANK", 0)
    # Without a count of its own a node is taken to hold everything up to one node's worth: one process per node when
    # every local rank is 0, which is what schedulers that export only RANK, WORLD_SIZE and LOCAL_RANK start.
    local_world_size = _integer(variables, "LOCAL_WORLD_SIZE", 1 if local_rank == 0 else world_size)
    if not 0 < local_world_size <= world_size:
        message = f"must be between 1 and WORLD_SIZE={world_size}"
        raise _error("LOCAL_WORLD_SIZE", str(local_world_size), message)
    address, port = _master(variables, "127.0.0.1", _DEFAULT_PORT)
    num_nodes = -(-world_size // local_world_size)
    rank = _integer(variables, "RANK")
    return LaunchEnvironment("torchrun", rank, local_rank, world_size, local_world_size, num_nodes, address, port)


def _submitit(variables: Mapping[str, str]) -> LaunchEnvironment:
    world_size = _integer(variables, "SUBMITIT_LOCAL_NTASKS", 1)
    if world_size == 1:
        return _SINGLE
    # The process id of the job's controller: the same for all tasks, and again after a requeue.
    port = _FIRST_PORT + _integer(variables, "SUBMITIT_LOCAL_JOB_ID", 0) % _NUM_PORTS
    address, port = _master(variables, "127.0.0.1", port)
    rank = _integer(variables, "SUBMITIT_LOCAL_GLOBALID")
    local_rank = _integer(variables, "SUBMITIT_LOCAL_LOCALID", rank)
    return LaunchEnvironment("submitit", rank, local_rank, world_size, world_size, 1, address, port)


def _is_step_task(variables: Mapping[str, str]) -> bool:
    step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or ""
    return step.isdigit() and int(step) < _FIRST_RESERVED_STEP and bool(variables.get("SLURM_PROCID"))


def _slurm(variables: Mapping[str, str]) -> LaunchEnvironment:
    world_size = _integer(variables, "SLURM_STEP_NUM_TASKS", _integer(variables, "SLURM_NTASKS", 1))
    num_nodes = _integer(variables, "SLURM_STEP_NUM_NODES", _integer(variables, "SLURM_NNODES", 1))
    if not 0 < num_nodes <= world_size:
        raise _error("SLURM_NNODES", str(num_nodes), f"must be between 1 and the {world_size} tasks of the step")
    nodelist = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = _integer(variables, "SLURM_JOB_ID", 0)
    step = _integer(variables, "SLURM_STEP_ID", 0)
    # The step's number keeps two steps of one job apart; both numbers are the same after a requeue.
    port = _FIRST_PORT + (job * 31 + step) % _NUM_PORTS
    address, port = _master(variables, expand_hosts(nodelist)[0], port)
    return LaunchEnvironment(
        launcher="slurm",
        rank=_integer(variables, "SLURM_PROCID"),
        local_rank=_integer(variables, "SLURM_LOCALID", 0),
        world_size=world_size,
        local_world_size=_slurm_local_world_size(variables, world_size, num_nodes),
        num_nodes=num_nodes,
        master_addr=address,
        master_port=port,
    )


def _slurm_local_world_size(variables: Mapping[str, str], world_size: int, num_nodes: int) -> int:
    """Tasks on this node, from Slurm's run-length form `2(x3),1`; an even spread where it says nothing."""
    counts: list[int] = []
    for item in (variables.get("SLURM_STEP_TASKS_PER_NODE") or "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(variables, "SLURM_NODEID", 0)
    if 0 <= node < len(counts):
        return counts[node]
    per_node = variables.get("SLURM_NTASKS_PER_NODE")
    return _integer(variables, "SLURM_NTASKS_PER_NODE") if per_node else -(-world_size // num_nodes)


def _master(variables: Mapping[str, str], address: str, port: int) -> tuple[str, int]:
    return variables.get("MASTER_ADDR") or address, _integer(variables, "MASTER_PORT", port)


def _integer(variables: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = variables.get(key) or ""
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise _error(key, text, "is not an integer: unset it, or let the launcher set it") from None


def _check_range(key: str, value: int, noun: str, size: int) -> None:
    if not 0 <= value < size:
        raise _error(key, str(value), f"must be at least 0 and below the {size} {noun}")


def _error(key: str, value: str, message: str) -> ConfigError:
    return ConfigError(Violation(f"environment variable {key}", f"{value!r} {message}"))


def gpu_files() -> list[Path]:
    """Return the files by which NVIDIA's driver offers each GPU of this machine; under WSL, its library alone."""
    return [*sorted(Path("/dev").glob("nvidia[0-9]*")), *Path("/usr/lib/wsl/lib").glob("libcuda.so.1")]


def visible_gpus() -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES, or else the numbers of all GPUs of this machine; torch is not asked."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(gpu_files())]
