"""Detection of the launcher of this process, its rank and the world size.

The first rule that matches applies:

1. torchrun, or another launcher with the same variables (also inside a Slurm job): `RANK`, `WORLD_SIZE` and, if there
  are several ranks, `LOCAL_RANK` are set. Without `LOCAL_RANK`, but with `MASTER_ADDR` and `MASTER_PORT`, the process
  is a pod of a PyTorchJob; if such a pod has `PET_NPROC_PER_NODE`, rule 5 applies.
2. submitit started this process on this machine as one of several tasks: `SUBMITIT_EXECUTOR=local`, with
  `SUBMITIT_LOCAL_GLOBALID` and `SUBMITIT_LOCAL_NTASKS`. The rendezvous port is derived from the job number. A single
  task counts as one process, however submitit itself was started.
3. mpirun started this process: the four variables of Open MPI, or of MPICH and Intel MPI, are set.
4. The process is a task of a Slurm step: `SLURM_STEP_ID` is the number of an ordinary step and `SLURM_PROCID` is set.
  This covers plain `srun`, `srun` inside `sbatch` or `salloc`, and submitit. The world size is the size of the step,
  not of the job.
5. Kubeflow's Trainer started one process on this node: torchrun's options are in `PET_*`. foundry starts the ranks.
6. SageMaker started one process on this node: `SM_HOSTS` and `SM_CURRENT_HOST`. foundry starts the ranks.
7. One process. That includes the batch script of `sbatch` and the shell of `salloc`: their environment contains
  `SLURM_NTASKS=4` (and, in a batch script, `SLURM_PROCID=0`), although the other three tasks do not exist. If the batch
  script, the interactive step or the extern step has a step number, the number is reserved by Slurm.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foundry.config import engines
from foundry.config.launch_variables import (
    DEFAULT_PORT,
    LaunchEnvironment,
    check_range,
    integer,
    master,
    variable_error,
)

if TYPE_CHECKING:
    from foundry.config.schemas.distributed import Distributed

STORE = "FOUNDRY_STORE"
"""Environment variable with the rendezvous file of the processes that foundry starts on this machine."""

# slurm.h: SLURM_PENDING_STEP, SLURM_EXTERN_CONT, SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP, … are the top of 32 bits.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Below Linux's ephemeral range (32768-60999), so that no outgoing connection can hold the port.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True)
class Launch:
    """How the run will be started, as far as composition can know.

    Attributes:
        environment: rank and sizes of this process by its launcher; otherwise of a single process.
        tasks: number of processes that a sweep's launcher starts for each job.
        distributed: settings with the number of processes that the run itself starts.
    """

    environment: LaunchEnvironment
    tasks: int
    distributed: "Distributed"

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        if self.environment.launcher != "single":
            return self.environment.world_size
        return self.tasks if self.tasks > 1 else self.distributed.nproc_per_node

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.distributed.dp_size(self.world_size)


_SINGLE = LaunchEnvironment("single", 0, 0, 1, 1, 1)


def detect(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Detect the launch from environment variables, by the rules in the module docstring.

    Args:
        environ: the variables; None for the environment of this process.

    Raises:
        ConfigError: if variables are not integers, contradict each other, or are incomplete.
    """
    variables = os.environ if environ is None else environ
    has_ranks = bool(variables.get("RANK") or variables.get("WORLD_SIZE"))
    if has_ranks and not _is_pod_of_several_ranks(variables):
        if (pod := engines.pytorchjob(variables)) is not None:
            return pod
        environment, keys = _torchrun(variables), ("RANK", "LOCAL_RANK")
    elif is_local_submitit(variables):
        environment, keys = _submitit(variables), ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID")
    elif (task := engines.mpi(variables, in_slurm_step=_is_step_task(variables))) is not None:
        return task
    elif _is_step_task(variables):
        environment, keys = _slurm(variables), ("SLURM_PROCID", "SLURM_LOCALID")
    else:
        return engines.kubeflow(variables, visible_gpus) or engines.sagemaker(variables) or _SINGLE
    check_range(keys[0], environment.rank, "processes", environment.world_size)
    check_range(keys[1], environment.local_rank, "processes on this node", environment.local_world_size)
    return environment


def is_local_submitit(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if this process is a task that submitit started on this machine, without a batch system."""
    variables = os.environ if environ is None else environ
    return variables.get("SUBMITIT_EXECUTOR") == "local" and bool(variables.get("SUBMITIT_LOCAL_GLOBALID"))


@contextmanager
def default_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables in `values` that are not set yet, and unset the added variables on exit.

    Enter this context in the main thread: changing the environment while another thread reads it is not safe.
    """
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def expand_hosts(nodelist: str) -> list[str]:
    """Expand a Slurm node list such as `node[001-004,7],x1` to its hosts, in order.

    Raises:
        ConfigError: if a bracket does not close or a range is invalid.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if ",".join(parts) != nodelist:
        raise variable_error("SLURM_JOB_NODELIST", nodelist, "is not a node list such as node[001-004,7],x1")
    return [host for part in parts for host in _expand_host(part, nodelist)]


def _expand_host(part: str, nodelist: str) -> Iterator[str]:
    """Expand the brackets of one part: `a[1-2]b[3,4]` → a1b3 a1b4 a2b3 a2b4."""
    bracket = re.search(r"\[([^\]]*)\]", part)
    if bracket is None:
        yield part
        return
    for item in bracket[1].split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise variable_error(
                "SLURM_JOB_NODELIST", nodelist, f"has an invalid range {item!r}; a range is a number or like 001-004"
            )
        first, last = span[1], span[2] or span[1]
        for number in range(int(first), int(last) + 1):
            yield from _expand_host(
                f"{part[: bracket.start()]}{number:0{len(first)}d}{part[bracket.end() :]}", nodelist
            )


def _torchrun(variables: Mapping[str, str]) -> LaunchEnvironment:
    for key in ("RANK", "WORLD_SIZE"):
        if not variables.get(key):
            other = "WORLD_SIZE" if key == "RANK" else "RANK"
            raise variable_error(other, variables[other], f"is set but {key} is not: start with torchrun, or unset it")
    world_size = integer(variables, "WORLD_SIZE")
    if world_size > 1 and not variables.get("LOCAL_RANK"):
        remedy = "is set but LOCAL_RANK is not: set it (0 if each node runs one process), or start with torchrun"
        raise variable_error("RANK", variables["RANK"], remedy)
    local_rank = integer(variables, "LOCAL_RANK", 0)
    # Without LOCAL_WORLD_SIZE, assume one process per node if the local rank is 0, since batch systems that export only
    # RANK, WORLD_SIZE and LOCAL_RANK start one per node; otherwise assume that all processes are on this node.
    local_world_size = integer(variables, "LOCAL_WORLD_SIZE", 1 if local_rank == 0 else world_size)
    if world_size < 1:
        raise variable_error("WORLD_SIZE", str(world_size), "must be at least 1: let the launcher set it")
    if not 0 < local_world_size <= world_size:
        message = f"must be between 1 and WORLD_SIZE={world_size}"
        raise variable_error("LOCAL_WORLD_SIZE", str(local_world_size), message)
    address, port = master(variables, "127.0.0.1", DEFAULT_PORT)
    num_nodes = -(-world_size // local_world_size)
    rank = integer(variables, "RANK")
    return LaunchEnvironment("torchrun", rank, local_rank, world_size, local_world_size, num_nodes, address, port)


def _submitit(variables: Mapping[str, str]) -> LaunchEnvironment:
    world_size = integer(variables, "SUBMITIT_LOCAL_NTASKS", 1)
    if world_size == 1:
        return _SINGLE
    # SUBMITIT_LOCAL_JOB_ID is the process id of the job's controller: the same for all tasks, and again after a
    # requeue.
    port = _FIRST_PORT + integer(variables, "SUBMITIT_LOCAL_JOB_ID", 0) % _NUM_PORTS
    address, port = master(variables, "127.0.0.1", port)
    rank = integer(variables, "SUBMITIT_LOCAL_GLOBALID")
    local_rank = integer(variables, "SUBMITIT_LOCAL_LOCALID", rank)
    return LaunchEnvironment("submitit", rank, local_rank, world_size, world_size, 1, address, port)


def _is_pod_of_several_ranks(variables: Mapping[str, str]) -> bool:
    """Return whether this is a pod of a PyTorchJob with `nprocPerNode`, whose RANK is the number of the pod."""
    return bool(variables.get("PET_NPROC_PER_NODE") and variables.get("PET_NODE_RANK")) and not variables.get(
        "LOCAL_RANK"
    )


def _is_step_task(variables: Mapping[str, str]) -> bool:
    step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or ""
    return step.isdigit() and int(step) < _FIRST_RESERVED_STEP and bool(variables.get("SLURM_PROCID"))


def _slurm(variables: Mapping[str, str]) -> LaunchEnvironment:
    world_size = integer(variables, "SLURM_STEP_NUM_TASKS", integer(variables, "SLURM_NTASKS", 1))
    num_nodes = integer(variables, "SLURM_STEP_NUM_NODES", integer(variables, "SLURM_NNODES", 1))
    if not 0 < num_nodes <= world_size:
        raise variable_error(
            "SLURM_NNODES", str(num_nodes), f"must be between 1 and {world_size}, the number of tasks of the step"
        )
    nodelist = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = integer(variables, "SLURM_JOB_ID", 0)
    step = integer(variables, "SLURM_STEP_ID", 0)
    # The step number keeps two steps of one job apart; both numbers are the same after a requeue.
    port = _FIRST_PORT + (job * 31 + step) % _NUM_PORTS
    address, port = master(variables, expand_hosts(nodelist)[0], port)
    return LaunchEnvironment(
        launcher="slurm",
        rank=integer(variables, "SLURM_PROCID"),
        local_rank=integer(variables, "SLURM_LOCALID", 0),
        world_size=world_size,
        local_world_size=_slurm_local_world_size(variables, world_size, num_nodes),
        num_nodes=num_nodes,
        master_addr=address,
        master_port=port,
    )


def _slurm_local_world_size(variables: Mapping[str, str], world_size: int, num_nodes: int) -> int:
    """Return the number of tasks on this node by Slurm's variables, such as `2(x3),1`, or assuming an even spread."""
    counts: list[int] = []
    for item in (variables.get("SLURM_STEP_TASKS_PER_NODE") or "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item):
            counts += [int(match[1])] * int(match[2] or 1)
    node = integer(variables, "SLURM_NODEID", 0)
    if 0 <= node < len(counts):
        return counts[node]
    per_node = variables.get("SLURM_NTASKS_PER_NODE")
    return integer(variables, "SLURM_NTASKS_PER_NODE") if per_node else -(-world_size // num_nodes)


def gpu_files() -> list[Path]:
    """Return the device files of NVIDIA's driver, one per GPU of this machine; under WSL, the path of its library."""
    return [*sorted(Path("/dev").glob("nvidia[0-9]*")), *Path("/usr/lib/wsl/lib").glob("libcuda.so.1")]


def visible_gpus() -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or the numbers of all GPUs of this machine. Does not import torch."""
    if (entries := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in entries.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(gpu_files())]
