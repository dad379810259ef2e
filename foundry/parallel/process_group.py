"""The ranks of a run: who we are, on which device, and how long we live."""

import itertools
import os
import resource
import socket
from collections.abc import Callable, Iterator
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

from foundry.config.environment import STORE, LaunchEnvironment, detect
from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import Backend, Distributed, Resolved, Single, resolve_distributed
from foundry.core.errors import ConfigError, Violation
from foundry.core.stopped import Stopped
from foundry.parallel.device import choose_device, count_cuda, reset_memory_statistics, select_cuda
from foundry.parallel.flight_recorder import record_collectives

DATA_DIMS = ("replicate", "shard")
"""The dimensions of a device mesh along which ranks have samples of their own; along any other they share them."""

TENSOR_DIM = "tensor"
"""The dimension along which ranks divide the matrices of a model between them."""

Join = Callable[[Distributed, LaunchEnvironment, str, torch.device], None]
"""Joins torch's default process group: settings, launch variables, names of the backends, device of this rank."""

_numbers = itertools.count()
"""Of the process groups that this process has joined; a file store serves one."""


@dataclass(frozen=True)
class World:
    """This process among those that train together.

    Attributes:
        rank: over all nodes.
        local_rank: on this node.
        world_size: number of ranks.
        local_world_size: ranks on this node.
        device: where this rank computes.
        distributed: how the ranks train together.
        mesh: the ranks, arranged for that; None where nothing is wrapped.
        dp_group: the ranks with whose samples this one's make up the global batch; None: all.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    distributed: Resolved = field(default_factory=Single)
    mesh: DeviceMesh | None = None
    dp_group: ProcessGroup | None = None

    @classmethod
    def single(cls, device: torch.device) -> Self:
        """Return the world of a process that computes alone."""
        return cls(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device)

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_size` shares of a global batch is this rank's; files and messages name `rank` instead."""
        return self.rank if self.dp_group is None else self.dp_group.rank()

    @property
    def dp_size(self) -> int:
        """How many ranks divide a global batch among them."""
        return self.world_size if self.dp_group is None else self.dp_group.size()

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The dimensions of the mesh that divide the data, which is what FSDP2 shards over."""
        assert self.mesh is not None, "there is no mesh where nothing is wrapped"
        names = _data_dims(self.mesh)
        return self.mesh if names == self.mesh.mesh_dim_names else self.mesh[names]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The dimension of the mesh that divides matrices; None where they are whole."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return self.mesh[TENSOR_DIM] if self.mesh is not None and TENSOR_DIM in names else None

    @property
    def leads_share(self) -> bool:
        """Whether this is the first of the ranks that share their samples; what is done once for a share, it does."""
        if self.mesh is None:
            return True
        names, place = self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or ()
        return not any(index for name, index in zip(names, place, strict=True) if name not in DATA_DIMS)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it; on one process it is the sum already."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def dp_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks that divide a global batch, in place, and return it."""
        if self.dp_size > 1:
            dist.all_reduce(tensor, group=self.dp_group)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


@contextmanager
def process_group(
    config: Distributed, kind: DeviceKind = DeviceKind.auto, *, join: Join | None = None
) -> Iterator[World]:
    """Join the ranks that were started together, arranged as `config` says, and leave them at the end.

    A rank that fails leaves by the end of its process: to leave in order NCCL waits for collectives that the others
    will never join, and whatever the process has to say would wait with it.

    One process joins nothing, except with `cpu_offload`: FSDP2 does the offloading, and needs a group even of one.

    Args:
        config: backend, meeting place and timeout.
        kind: of the devices to compute on.
        join: joins the process group; None: `join_ranks`.

    Raises:
        ConfigError: more ranks than GPUs on this node, no usable GPU, nccl on CPUs, launch variables that contradict,
            or a strategy that does not fit the number of ranks.
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
        message = "is gloo, which cannot reduce and scatter the gradients of FSDP2 on GPUs: use nccl, or auto"
        raise ConfigError(Violation("distributed.backend", f"{message}; or set distributed=ddp, or device=cpu"))
    _prefer_loopback(environment.num_nodes)
    _allow_many_connections()
    record_collectives()
    if dist.is_initialized():  # a run of this process has failed before
        dist.destroy_process_group()
    (join or join_ranks)(config, environment, backend, device)
    is_in_order = world.world_size == 1
    try:
        world = arrange(world, config)
        limit_waits(config.start_limit_seconds)
        yield world
        is_in_order = True
    except Stopped:  # as all ranks have agreed
        is_in_order = True
        raise
    finally:
        if is_in_order:
            dist.destroy_process_group()


def arrange(world: World, config: Distributed) -> World:
    """The world with its strategy resolved and the device mesh of that; called by all ranks, within a process group.

    Raises:
        ConfigError: the strategy does not fit the number of ranks.
    """
    distributed = resolve_distributed(config, world.world_size)
    shape = distributed.mesh_shape(world.world_size)
    mesh = init_device_mesh(world.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)) if shape else None
    return with_mesh(replace(world, distributed=distributed), mesh)


def with_mesh(world: World, mesh: DeviceMesh | None) -> World:
    """The world on a device mesh, and the group of ranks that divide the data; called by all ranks."""
    group = None
    if mesh is not None and (names := _data_dims(mesh)) != mesh.mesh_dim_names:
        data = mesh[names]
        group = (data if data.ndim == 1 else data._flatten("data")).get_group()
    return replace(world, mesh=mesh, dp_group=group)


def side_group(world: World) -> ProcessGroup | None:
    """A group of all ranks in host memory, for what another thread says; None where a rank is alone.

    All ranks make it together. Each is one more connection to every other rank, so there is one for those who need it.
    """
    if world.world_size == 1 or not _has_peers():
        return None
    default = dist.distributed_c10d._get_default_group()
    limit = default._get_backend(torch.device("cpu")).options._timeout
    group: ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
    return group


def limit_waits(seconds: float) -> None:
    """Have every collective of this process, in whichever group, fail soon after a watchdog of so many seconds.

    Torch gives the groups that it makes for a device mesh, and for parts of one, half an hour of its own.
    """
    for group in dist.distributed_c10d._world.pg_map if _has_peers() else ():
        group.set_timeout(_longest_wait(seconds))


def _has_peers() -> bool:
    """Whether there are processes to talk to: torch's fake backend has ranks without processes."""
    return dist.is_initialized() and dist.get_backend() != dist.Backend.FAKE


def _data_dims(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.mesh_dim_names or () if name in DATA_DIMS)


def _device(environment: LaunchEnvironment, device: torch.device) -> torch.device:
    """This rank's device of that kind."""
    if device.type != "cuda":
        return device
    count = count_cuda()
    # Slurm's --gpus-per-task shows each task its own GPU only, as number 0, and so does who sets CUDA_VISIBLE_DEVICES
    # for each process. Those that foundry or submitit start here all have the same; NCCL names two that share one
    # otherwise.
    is_shared = STORE in os.environ or environment.launcher == "submitit"
    is_own = environment.launcher == "slurm" or ("CUDA_VISIBLE_DEVICES" in os.environ and not is_shared)
    index = 0 if count == 1 and is_own else environment.local_rank
    if index >= count:
        message = f"is {environment.local_world_size} but this node has {count} GPUs: start at most one process per GPU"
        raise ConfigError(Violation("processes on this node", message))
    device = torch.device("cuda", index)
    select_cuda(device)
    reset_memory_statistics(device)  # a run before this one in the process may have had a higher peak
    return device


def _backend(config: Distributed, device: torch.device) -> str:
    """The backend's name for torch; on GPUs gloo moves tensors in host memory, which offloading and counting need."""
    if config.backend is Backend.gloo or (config.backend is Backend.auto and device.type != "cuda"):
        return "gloo"
    if device.type != "cuda":
        raise ConfigError(Violation("distributed.backend", "is nccl but the run is on the CPU: use gloo, or auto"))
    return "cpu:gloo,cuda:nccl"


def _longest_wait(seconds: float) -> timedelta:
    """For a collective: longer than the watchdog's time, since that knows which rank is to blame."""
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
    if method == "env://" and environment.launcher in ("slurm", "submitit"):
        # These set neither MASTER_ADDR nor RANK; the variables that they do set say the same.
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
    """Where ranks of one machine find each other, out of reach of any other machine; None: as `init_method` says.

    torch's own store listens on every interface of rank 0's machine. Ranks that foundry has started meet in a file
    that only their user can open; others by the loopback interface, where that is where they are told to meet.
    """
    if config.init_method == "env://" and (path := os.environ.get(STORE)):
        store = FileStore(f"{path}{next(_numbers)}", environment.world_size)
        store.set_timeout(timeout)
        return store
    host, port = environment.master_addr, environment.master_port
    if config.init_method.startswith("tcp://"):
        url = urlsplit(config.init_method)
        host, port = url.hostname or "", url.port or 0
    elif environment.launcher in ("slurm", "submitit") and environment.num_nodes == 1:
        host = "localhost"
    elif config.init_method != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if not (host == "localhost" or host.startswith("127.")) or not 0 < port < 65536:
        return None
    listener = socket.create_server(("127.0.0.1", port)).detach() if environment.rank == 0 else None
    return TCPStore(
        "127.0.0.1", port, environment.world_size, environment.rank == 0, timeout, master_listen_fd=listener
    )


def _allow_many_connections() -> None:
    """Let this process have as many open files as it may: gloo holds one for each other rank in each of its groups."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS refuses what it says is the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _prefer_loopback(num_nodes: int) -> None:
    """On one node let gloo and NCCL use the loopback interface, which nobody reaches from outside.

    The host's own name, gloo's choice, may also resolve to nothing reachable. It stays set while the process lives,
    because groups made later (meshes) read it too.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if num_nodes == 1 and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
