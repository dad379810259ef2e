"""Ranks and sizes from the variables of MPI, Kubeflow and SageMaker.

Names of the variables:

- Open MPI: https://docs.open-mpi.org, "Environment variables set for MPI applications". MPICH and Intel MPI: `PMI_*`
  and `MPI_LOCALRANKID`, set by their process manager Hydra.
- Kubeflow Trainer: `PET_*`, pkg/constants/constants.go in https://github.com/kubeflow/trainer. torchrun
  reads its options from the same variables. PyTorchJob, its predecessor: pkg/controller.v1/pytorch/envvar.go in
  https://github.com/kubeflow/training-operator.
- SageMaker: ENVIRONMENT_VARIABLES.md in https://github.com/aws/sagemaker-training-toolkit.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence

from foundry.config.launch_variables import (
    DEFAULT_PORT,
    LaunchEnvironment,
    Launcher,
    check_range,
    integer,
    master,
    read_port,
    require,
    variable_error,
)

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA_MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PET = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")
_SAGEMAKER = ("SM_HOSTS", "SM_CURRENT_HOST")


def mpi(variables: Mapping[str, str], *, in_slurm_step: bool) -> LaunchEnvironment | None:
    """Return the place of a process that mpirun started; None without its variables.

    Args:
        variables: the environment.
        in_slurm_step: whether srun may have set `PMI_RANK` and `PMI_SIZE`, which alone are then no sign of mpirun.

    Raises:
        ConfigError: only some of the variables are set, or they contradict each other, or several nodes have no
            MASTER_ADDR.
    """
    own_keys = (OPEN_MPI, HYDRA_MPI[2:] if in_slurm_step else HYDRA_MPI)
    present = next((key for keys in own_keys for key in keys if variables.get(key)), None)
    if present is None:
        return None
    keys = OPEN_MPI if present in OPEN_MPI else HYDRA_MPI
    require(variables, "mpirun", keys, present)
    rank, world_size, local_rank, local_world_size = (integer(variables, key) for key in keys)
    if not 0 < local_world_size <= world_size:
        raise variable_error(keys[3], str(local_world_size), f"must be between 1 and {keys[1]}={world_size}")
    check_range(keys[0], rank, "processes", world_size)
    check_range(keys[2], local_rank, "processes on this node", local_world_size)
    if local_world_size < world_size and not variables.get("MASTER_ADDR"):
        message = f"is more than the {local_world_size} on this node but MASTER_ADDR is not set: set it to the host of"
        raise variable_error(keys[1], str(world_size), f"{message} rank 0, as in mpirun -x MASTER_ADDR=HOST")
    num_nodes = -(-world_size // local_world_size)
    address, port = master(variables, "127.0.0.1", DEFAULT_PORT)
    return LaunchEnvironment("mpi", rank, local_rank, world_size, local_world_size, num_nodes, address, port)


def pytorchjob(variables: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the place of the only process in a pod of a PyTorchJob; None without its variables, or with one pod.

    The operator sets RANK and WORLD_SIZE to number and count of the pods, and no LOCAL_RANK. A PyTorchJob with several
    processes in a pod has the variables of `kubeflow` in addition.

    Raises:
        ConfigError: the variables contradict each other.
    """
    keys = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(variables.get(key) for key in keys) or variables.get("LOCAL_RANK"):
        return None
    rank, world_size = integer(variables, "RANK"), integer(variables, "WORLD_SIZE")
    if world_size == 1:
        return None
    check_range("RANK", rank, "pods", world_size)
    address, port = master(variables, "127.0.0.1", DEFAULT_PORT)
    return LaunchEnvironment("pytorchjob", rank, 0, world_size, 1, world_size, address, port)


def kubeflow(variables: Mapping[str, str], list_gpus: Callable[[], Sequence[str]]) -> LaunchEnvironment | None:
    """Return the place of the first rank of a node by torchrun's `PET_*` variables; None without them.

    Args:
        variables: the environment.
        list_gpus: returns the GPUs of this machine.

    Raises:
        ConfigError: a variable is missing or invalid, or asks for an elastic number of nodes.
    """
    present = next((key for key in _PET if variables.get(key)), None)
    if present is None:
        return None
    num_nodes, per_node = _pet_nodes(variables), _pet_processes(variables, list_gpus)
    if num_nodes > 1:
        require(variables, "Kubeflow", ("PET_NODE_RANK",), "PET_NNODES")
        if variables.get("PET_RDZV_ENDPOINT") and not variables.get("PET_MASTER_ADDR"):
            message = "but foundry meets at PET_MASTER_ADDR: set that, or start with torchrun"
            raise variable_error("PET_RDZV_ENDPOINT", variables["PET_RDZV_ENDPOINT"], message)
        if not variables.get("PET_MASTER_ADDR") and not variables.get("MASTER_ADDR"):
            require(variables, "Kubeflow", ("PET_MASTER_ADDR",), "PET_NNODES")
    node = integer(variables, "PET_NODE_RANK", 0)
    check_range("PET_NODE_RANK", node, "nodes", num_nodes)
    address, port = master(variables, "127.0.0.1", DEFAULT_PORT)
    address, port = variables.get("PET_MASTER_ADDR") or address, read_port(variables, "PET_MASTER_PORT", port)
    return _node("kubeflow", node, num_nodes, per_node, address, port)


def _pet_nodes(variables: Mapping[str, str]) -> int:
    text = variables.get("PET_NNODES") or "1"
    limits = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if limits is None or int(limits[1]) < 1:
        raise variable_error("PET_NNODES", text, "is not a number of nodes: set it as in PET_NNODES=2")
    if limits[2] not in (None, limits[1]):
        raise variable_error("PET_NNODES", text, "is elastic: set one number, or start with torchrun")
    return int(limits[1])


def _pet_processes(variables: Mapping[str, str], list_gpus: Callable[[], Sequence[str]]) -> int:
    """Return the number of processes of this node, with torchrun's words `auto`, `gpu` and `cpu`."""
    text = variables.get("PET_NPROC_PER_NODE") or "1"
    if text in ("auto", "gpu", "cpu"):
        num_gpus = 0 if text == "cpu" else len(list_gpus())
        count = num_gpus if text == "gpu" or num_gpus else os.cpu_count() or 1
    else:
        count = integer(variables, "PET_NPROC_PER_NODE", 1)
    if count < 1:
        reason = "but this node has no GPU" if text == "gpu" else "must be at least 1"
        raise variable_error("PET_NPROC_PER_NODE", text, f"{reason}: set a number, auto or cpu")
    return count


def sagemaker(variables: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the place of the first rank of a node by SageMaker's variables; None without them.

    Nodes are numbered in the order of SM_HOSTS, and each has one rank per GPU, or one rank without GPUs.

    Raises:
        ConfigError: a variable is missing or invalid.
    """
    present = next((key for key in _SAGEMAKER if variables.get(key)), None)
    if present is None:
        return None
    require(variables, "SageMaker", _SAGEMAKER, present)
    text = variables["SM_HOSTS"]
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise variable_error("SM_HOSTS", text, 'is not a JSON list of hosts such as ["algo-1","algo-2"]')
    host = variables["SM_CURRENT_HOST"]
    if host not in hosts:
        raise variable_error("SM_CURRENT_HOST", host, f"is not in SM_HOSTS={text}")
    count = integer(variables, "SM_NUM_GPUS", 0)
    if count < 0:
        raise variable_error("SM_NUM_GPUS", str(count), "must be at least 0: unset it, or let SageMaker set it")
    address, port = master(variables, hosts[0], DEFAULT_PORT)
    return _node("sagemaker", hosts.index(host), len(hosts), max(count, 1), address, port)


def _node(
    launcher: Launcher, node: int, num_nodes: int, per_node: int, address: str, port: int
) -> LaunchEnvironment | None:
    """Return the place of a node; None for one process alone, which counts as started without a launcher."""
    world_size = num_nodes * per_node
    if world_size == 1:
        return None
    return LaunchEnvironment(launcher, node * per_node, 0, world_size, per_node, num_nodes, address, port)
