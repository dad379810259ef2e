"""The ranks of a run: process group, device, device mesh and timeouts."""

import itertools
import os
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Self
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from foundry.config.environment import STORE, detect
from foundry.config.launch_variables import LaunchEnvironment
from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import Backend, Distributed, Resolved, Single, resolve_distributed
from foundry.core.errors import ConfigError, Violation, counted
from foundry.core.stop_signals import Stopped
from foundry.parallel.device import choose_device, count_cuda, reset_memory_statistics, select_cuda
from foundry.parallel.disks import Disks
from foundry.parallel.flight_recorder import record_collectives

DATA_DIMS = ("replicate", "shard")
"""Mesh dimensions along which ranks process different samples; along other dimensions they process the same samples."""

TENSOR_DIM = "tensor"
"""Mesh dimension along which ranks shard the matrices of a model."""

_PROCESSES_PER_NODE = {
    "slurm": "hydra.launcher.tasks_per_node",
    "submitit": "hydra.launcher.tasks_per_node",
    "torchrun": "torchrun --nproc-per-node",
    "mpi": "mpirun -np",
}
"""Setting of the number of processes on a node, for each launcher; else `distributed.nproc_per_node`."""

Join = Callable[[Distributed, LaunchEnvironment, str, torch.device], None]
"""Joins torch's default process group, given settings, launch variables, backend names and this rank's device."""

_numbers = itertools.count()
"""Numbers for the names of this process's file stores; a file store can be used only once."""


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of a run.

    Samples, counts, metrics and gradients are divided and summed over the data-parallel ranks. Global rank and world
    size are for files, logs, agreement between ranks, and FLOPs per device. Ranks along a mesh dimension that is not in
    `DATA_DIMS` process the same samples with the same results; one of them (`leads_share`) does the work that is needed
    once per sample.

    Attributes:
        rank: global rank.
        local_rank: rank on this node.
        world_size: number of ranks.
        local_world_size: number of ranks on this node.
        device: device of this rank.
        distributed: the resolved strategy.
        mesh: device mesh of the strategy; None if the strategy is `Single`.
        dp_group: data-parallel group, whose samples together are the global batch; None if this is all ranks.
        disks: disks of the nodes; None if all ranks share the run directory.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    distributed: Resolved = field(default_factory=Single)
    mesh: DeviceMesh | None = None
    dp_group: ProcessGroup | None = None
    disks: Disks | None = None

    @classmethod
    def single(cls, device: torch.device) -> Self:
        """Return the world of a process that computes alone."""
        return cls(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device)

    @property
    def dp_rank(self) -> int:
        """Index of this rank's share of a global batch, out of `dp_size`; files and messages use `rank` instead."""
        return self.rank if self.dp_group is None else self.dp_group.rank()

    @property
    def dp_size(self) -> int:
        """Number of ranks that a global batch is divided among."""
        return self.world_size if self.dp_group is None else self.dp_group.size()

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The data-parallel dimensions of the mesh; FSDP2 shards over them."""
        assert self.mesh is not None, "there is no mesh where nothing is wrapped"
        names = _data_dims(self.mesh)
        return self.mesh if names == self.mesh.mesh_dim_names else self.mesh[names]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The tensor-parallel dimension of the mesh; None without tensor parallelism."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return self.mesh[TENSOR_DIM] if self.mesh is not None and TENSOR_DIM in names else None

    @property
    def leads_share(self) -> bool:
        """Whether this is the first of the ranks that process the same samples; it does work needed once per share."""
        if self.mesh is None:
            return True
        names, place = self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or ()
        return not any(index for name, index in zip(names, place, strict=True) if name not in DATA_DIMS)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def leads_disk(self) -> bool:
        """Whether this rank creates and deletes the shared files of its run directory: rank 0, or one rank per disk."""
        return self.is_main if self.disks is None else self.disks.leaders[self.rank] == self.rank

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it; a single process returns it unchanged."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def dp_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the data-parallel ranks in place and return it."""
        if self.dp_size > 1:
            dist.all_reduce(tensor, group=self.dp_group)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


@contextmanager
def process_group(
    config: Distributed, kind: DeviceKind = DeviceKind.auto, *, join: Join | None = None
) -> Iterator[World]:
    """Join the process group with the mesh of `config`, and leave it at the end of the context.

    A rank that fails does not leave the process group but lets its process end: an orderly exit would make NCCL wait
    for collectives that the other ranks never join, and would delay the error message.

    A single process joins no process group, except with `cpu_offload`: FSDP2 does the offloading, and needs a process
    group even for one rank.

    Args:
        config: strategy, backend, init method and timeouts.
        kind: kind of device to use.
        join: joins the process group; None uses `join_ranks`.

    Raises:
        ConfigError: more ranks than GPUs on this node, no usable GPU, nccl on CPUs, gloo for FSDP2 on GPUs,
            contradictory launch variables, or a strategy that does not fit the number of ranks.
    """
    environment = detect()
    device = _device(environment, choose_device(kind))
    world = World(
        environment.rank, environment.local_rank, environment.world_size, environment.local_world_size, device
    )
    backend = _backend(config, device)
    resolved = resolve_distributed(config, world.world_size)
    if isinstance(resolved, Single):
        yield arrange(world, config)
        return
    if backend == "gloo" and device.type == "cuda" and "shard" in resolved.mesh_shape(world.world_size):
        message = "is gloo, which cannot reduce-scatter the gradients of FSDP2 on GPUs: use nccl or auto"
        raise ConfigError(Violation("distributed.backend", f"{message}; or set distributed=ddp, or device=cpu"))
    _prefer_loopback(environment.num_nodes)
    _allow_many_connections()
    record_collectives()
    if dist.is_initialized():  # a group left by an earlier, failed run in this process
        dist.destroy_process_group()
    (join or join_ranks)(config, environment, backend, device)
    is_in_order = world.world_size == 1
    try:
        world = arrange(world, config)
        limit_waits(config.start_limit_seconds)
        yield world
        is_in_order = True
    except Stopped:  # all ranks have agreed on this stop
        is_in_order = True
        raise
    finally:
        if is_in_order:
            dist.destroy_process_group()


def arrange(world: World, config: Distributed) -> World:
    """Return the world with its strategy resolved and its device mesh; all ranks must call this, in a process group.

    Raises:
        ConfigError: the strategy does not fit the number of ranks.
    """
    distributed = resolve_distributed(config, world.world_size)
    shape = distributed.mesh_shape(world.world_size)
    mesh = init_device_mesh(world.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)) if shape else None
    return with_mesh(replace(world, distributed=distributed), mesh)


def with_mesh(world: World, mesh: DeviceMesh | None) -> World:
    """Return the world with a device mesh and its data-parallel group; all ranks must call this."""
    group = None
    if mesh is not None and (names := _data_dims(mesh)) != mesh.mesh_dim_names:
        data = mesh[names]
        group = (data if data.ndim == 1 else data._flatten("data")).get_group()
    return replace(world, mesh=mesh, dp_group=group)


def side_group(world: World, ranks: Sequence[int] | None = None) -> ProcessGroup | None:
    """Create a gloo group for communication from another thread or of some ranks; None without other processes.

    All ranks must call this together. Each group adds a connection to every other rank, so create it only if needed.

    Args:
        world: this rank and its process group.
        ranks: members of the group; None for all ranks.
    """
    if world.world_size == 1 or not _has_peers():
        return None
    default = dist.distributed_c10d._get_default_group()
    limit = default._get_backend(torch.device("cpu")).options._timeout
    group: ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=limit)
    return group


def limit_waits(seconds: float) -> None:
    """Set the timeout of all process groups to a quarter more than a watchdog's timeout.

    Without this call, torch gives the groups of a device mesh and its slices a timeout of half an hour.

    Args:
        seconds: timeout of the watchdog.
    """
    for group in dist.distributed_c10d._world.pg_map if _has_peers() else ():
        group.set_timeout(_longest_wait(seconds))


def _has_peers() -> bool:
    """Return whether this process has joined a process group, other than one of torch's fake backend."""
    return dist.is_initialized() and dist.get_backend() != dist.Backend.FAKE


def _data_dims(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.mesh_dim_names or () if name in DATA_DIMS)


def _device(environment: LaunchEnvironment, device: torch.device) -> torch.device:
    """Return this rank's device of the same type as `device`; a GPU is made the current device."""
    if device.type != "cuda":
        return device
    count = count_cuda()
    # With Slurm's --gpus-per-task, or with CUDA_VISIBLE_DEVICES set per process, each process sees only its own GPU,
    # with index 0. Processes started by foundry or submitit on this node all see the same GPUs; if two would share one,
    # NCCL reports it.
    is_shared = STORE in os.environ or environment.launcher == "submitit"
    has_own_device = environment.launcher == "slurm" or ("CUDA_VISIBLE_DEVICES" in os.environ and not is_shared)
    index = 0 if count == 1 and has_own_device else environment.local_rank
    if index >= count:
        own = _own_key(environment.local_world_size)
        key = own if STORE in os.environ else _PROCESSES_PER_NODE.get(environment.launcher, own)
        message = f"is {environment.local_world_size} but this node has {counted(count, 'GPU')}"
        raise ConfigError(Violation(key, f"{message}; set it to {count}, or device=cpu"))
    device = torch.device("cuda", index)
    select_cuda(device)
    reset_memory_statistics(device)  # an earlier run in this process may have had a higher peak
    return device


def _own_key(num_processes: int) -> str:
    """Return the name of the setting that made foundry start this number of processes on this node."""
    variables = ("PET_NPROC_PER_NODE", "SM_NUM_GPUS")
    return next((key for key in variables if os.environ.get(key) == str(num_processes)), "distributed.nproc_per_node")


def _backend(config: Distributed, device: torch.device) -> str:
    """Return the backend string for torch; with nccl it adds gloo for CPU tensors, for offloading and counting."""
    if config.backend is Backend.gloo or (config.backend is Backend.auto and device.type != "cuda"):
        return "gloo"
    if device.type != "cuda":
        raise ConfigError(Violation("distributed.backend", "is nccl but the run is on the CPU: use gloo or auto"))
    return "cpu:gloo,cuda:nccl"


def _longest_wait(seconds: float) -> timedelta:
    """Return the timeout of collectives: longer than the watchdog's, which can name the rank at fault."""
    return timedelta(seconds=seconds * 1.25)


def join_ranks(config: Distributed, environment: LaunchEnvironment, backend: str, device: torch.device) -> None:
    """Join the ranks that were started together; see `Join`."""
    timeout = _longest_wait(config.start_limit_seconds)
    device_id = device if device.type == "cuda" and "nccl" in backend else None
    if environment.world_size == 1:
        dist.init_process_group(
            backend,
            store=HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
            device_id=device_id,
        )
        return
    store, method = _store(config, environment, timeout), config.init_method
    if method == "env://" and environment.launcher != "torchrun":
        # Only torchrun sets MASTER_ADDR, RANK and WORLD_SIZE; other launchers set different variables.
        method = f"tcp://{environment.master_addr}:{environment.master_port}"
    dist.init_process_group(
        backend,
        init_method=method if store is None else None,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=device_id,
    )


def _store(config: Distributed, environment: LaunchEnvironment, timeout: timedelta) -> Store | None:
    """Return a store that only this machine can reach; None if the ranks meet through `init_method`.

    torch's own store listens on every interface of rank 0's machine. Ranks started by foundry use a file that only
    their user can open; other ranks use the loopback interface if rank 0's address is on it or Slurm uses one node.
    """
    if config.init_method == "env://" and (path := os.environ.get(STORE)):
        store = FileStore(f"{path}{next(_numbers)}", environment.world_size)
        store.set_timeout(timeout)
        return store
    host, port = environment.master_addr, environment.master_port
    if config.init_method.startswith("tcp://"):
        url = urlsplit(config.init_method)
        host, port = url.hostname or "", url.port or 0
    elif environment.launcher not in ("torchrun", "pytorchjob") and environment.num_nodes == 1:
        host = "localhost"
    elif environment.launcher == "pytorchjob" and host == "localhost":
        return None  # older operators call the master so in its own pod; the other pods connect from outside
    elif config.init_method != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if not (host == "localhost" or host.startswith("127.")) or not 0 < port < 65536:
        return None
    listener = socket.create_server(("127.0.0.1", port)).detach() if environment.rank == 0 else None
    return TCPStore(
        "127.0.0.1", port, environment.world_size, environment.rank == 0, timeout, master_listen_fd=listener
    )


def _allow_many_connections() -> None:
    """Raise the limit of open files to its maximum: gloo keeps one open for each other rank, in each of its groups."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS rejects the limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _prefer_loopback(num_nodes: int) -> None:
    """Make gloo and NCCL use the loopback interface, which other machines cannot reach, if there is only one node.

    gloo's default, the address of the host's own name, may also be unreachable. The variables stay set for the lifetime
    of the process, because groups created later (meshes) read them too.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if num_nodes == 1 and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
