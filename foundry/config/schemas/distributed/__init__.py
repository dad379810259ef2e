"""`distributed=`: the number of processes, and how they share model, optimizer and data."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from foundry.config.schemas.precision import PrecisionMode
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation, as_text

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

_DEFAULT_BUCKET_MB = 25.0
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s/:?#@]+):(?P<port>\d{1,5})")
_SYNC_DOC = (
    "gradient reduction: every: after each microbatch, least memory; last: once per step; last_keep_params: once "
    "per step, keeping the weights gathered"
)


def parse_init_method(text: str) -> None:
    """Check the init method of the process group.

    Raises:
        ValueError: the text is not env://, tcp://HOST:PORT or file:///PATH.
    """
    scheme, _, place = text.partition("://")
    if text == "env://" or (scheme == "file" and place.startswith("/") and not place.endswith("/")):
        return
    match = _HOST_AND_PORT.fullmatch(place)
    if scheme != "tcp" or match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"is {as_text(text)} but must be env://, tcp://HOST:PORT or file:///PATH")


class GradientSync(Enum):
    """Time of the gradient reduction over ranks within a window of gradient accumulation."""

    every = "every"
    last = "last"
    last_keep_params = "last_keep_params"


class Backend(Enum):
    """Communication backend of torch.distributed."""

    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Start and rendezvous of processes. Under torchrun, Slurm or another engine their number comes from it."""

    strategy: str = setting("auto", "name of the chosen option; auto: none on one process, fsdp on several")
    nproc_per_node: int = setting(
        1,
        "processes to start on this machine; leave at 1 under torchrun and Slurm",
        ge=1,
        le=1024,
    )
    backend: Backend = setting(Backend.auto, "auto: nccl on GPUs, gloo on CPUs")
    init_method: str = setting(
        "env://",
        "rendezvous of the ranks: env://: from the launcher's environment variables; tcp://HOST:PORT: at rank 0; "
        "file:///PATH: through a new file visible to all ranks",
        parse=parse_init_method,
    )
    timeout_seconds: float = setting(
        600.0,
        "timeout of a collective operation; on expiry the run ends and names the rank and the step",
        gt=0,
        le=10**7,
    )
    start_timeout_seconds: float | None = setting(
        None,
        "timeout until the end of the first step, which includes compilation; null: three times timeout_seconds",
        gt=0,
        le=10**7,
    )
    max_restarts: int = setting(
        0,
        "maximum number of restarts of the nproc_per_node processes after a failure, from the newest checkpoint",
        ge=0,
        le=1000,
    )
    gradient_sync: GradientSync = setting(GradientSync.every, _SYNC_DOC)
    tensor_parallel: int = setting(
        1,
        "number of neighbouring ranks that split each weight matrix and process the same samples",
        ge=1,
        le=1024,
    )

    def check(self) -> Iterator[Violation]:
        """Check that `strategy` matches the class; otherwise its fields would be missing or ignored."""
        strategy = type(self).strategy
        if self.strategy != strategy:
            message = f"is {self.strategy} but distributed={strategy} is chosen; choose distributed={self.strategy}"
            yield Violation("distributed.strategy", message)

    @property
    def start_limit_seconds(self) -> float:
        """Timeout in seconds for the start: `start_timeout_seconds`, by default 3 * `timeout_seconds`."""
        return 3 * self.timeout_seconds if self.start_timeout_seconds is None else self.start_timeout_seconds

    def dp_size(self, world_size: int) -> int:
        """Return the number of ranks, or of groups of `tensor_parallel` ranks, that process different samples."""
        return max(1, world_size // max(1, self.tensor_parallel))

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """Return the sizes of the device mesh by dimension, outermost first; empty without a mesh.

        The data is divided over the dimensions `replicate` and `shard`. `tensor` is the innermost dimension, so that
        the ranks of a tensor-parallel group are neighbours.
        """
        return {}

    def _with_tensor(self, **dims: int) -> dict[str, int]:
        return {**dims, "tensor": self.tensor_parallel} if self.tensor_parallel > 1 else dims


@dataclass(frozen=True, kw_only=True)
class Single(Distributed):
    """One process."""

    strategy: str = "none"


@dataclass(frozen=True, kw_only=True)
class DDP(Distributed):
    """Every rank holds the whole model; gradients are averaged."""

    strategy: str = "ddp"
    # With sharded weights, this default would keep unsharded gradients; under DDP they are unsharded in any case.
    gradient_sync: GradientSync = setting(GradientSync.last, _SYNC_DOC)
    overlap_grad_reduce: bool = setting(True, "reduce gradients in buckets during the backward pass")
    bucket_cap_mb: float = setting(_DEFAULT_BUCKET_MB, "size of a gradient bucket in MiB", gt=0, le=10**6)
    shard_optimizer: bool = setting(False, "shard the optimizer state: each rank keeps and updates one shard")
    overlap_param_gather: bool = setting(False, "with shard_optimizer: gather the next block's weights during compute")

    def check(self) -> Iterator[Violation]:
        """Check that DDP supports the combination of fields, and ignores none of them."""
        yield from super().check()
        if self.overlap_param_gather and not self.shard_optimizer:
            message = "is true but there is nothing to gather without shard_optimizer=true; set that, or leave this out"
            yield Violation("distributed.overlap_param_gather", message)
        elif self.overlap_param_gather and not self.overlap_grad_reduce:
            message = "is true but needs overlap_grad_reduce=true: both work block by block"
            yield Violation("distributed.overlap_param_gather", message)
        if self.bucket_cap_mb != _DEFAULT_BUCKET_MB and (self.shard_optimizer or not self.overlap_grad_reduce):
            reason = (
                "shard_optimizer reduces block by block" if self.shard_optimizer else "overlap_grad_reduce is false"
            )
            yield Violation(
                "distributed.bucket_cap_mb",
                f"is {self.bucket_cap_mb:g} but {reason}, so there are no buckets; leave it out",
            )
        if self.gradient_sync is GradientSync.last_keep_params and not self.shard_optimizer:
            message = "is last_keep_params but ddp never frees its parameters; choose last, or distributed=fsdp"
            yield Violation("distributed.gradient_sync", message)
        if self.tensor_parallel > 1 and not self.shard_optimizer:
            message = "but ddp averages whole tensors; set shard_optimizer=true, or choose distributed=fsdp"
            yield Violation("distributed.tensor_parallel", f"is {self.tensor_parallel} {message}")

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """Return a mesh with all data-parallel ranks in one dimension."""
        return self._with_tensor(**{"shard" if self.shard_optimizer else "replicate": self.dp_size(world_size)})


@dataclass(frozen=True, kw_only=True)
class FSDP(Distributed):
    """FSDP2: weights, gradients and optimizer state are sharded over all ranks."""

    strategy: str = "fsdp"
    reshard_after_forward: bool = setting(
        True,
        "free gathered weights after forward: less memory, one more all-gather",
    )
    cpu_offload: bool = setting(False, "keep weights, gradients and optimizer state in host memory")
    overlap_param_gather: bool = setting(True, "gather the next block's weights while this one computes")

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that fp16 is not combined with CPU offload: loss scaling needs gradients on the GPU."""
        if run.precision.mode is PrecisionMode.amp_float16 and self.cpu_offload:
            message = "is amp_float16 but its loss scaling needs gradients on the GPU: set"
            yield Violation("precision", f"{message} distributed.cpu_offload=false")

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """Return a mesh with all data-parallel ranks in one dimension."""
        return self._with_tensor(shard=self.dp_size(world_size))


@dataclass(frozen=True, kw_only=True)
class HSDP(FSDP):
    """FSDP2 within groups of ranks, replicas between groups."""

    strategy: str = "hsdp"
    num_replicas: int = setting(
        2,
        "number of groups of ranks with a full copy each; must divide the number of ranks, or of tensor_parallel "
        "groups",
        ge=1,
        le=10**6,
    )

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """Return a mesh with `shard` inside of `replicate`, so that the shards of a replica are neighbouring ranks."""
        shards = self.dp_size(world_size) // self.num_replicas
        return self._with_tensor(replicate=self.num_replicas, shard=shards)


Resolved: TypeAlias = Single | DDP | FSDP | HSDP


def resolve_distributed(config: Distributed, world_size: int) -> Resolved:
    """Return the strategy for a world size.

    `auto` is FSDP on several ranks. One process uses `Single`, unless it offloads to the CPU with FSDP.

    Raises:
        ConfigError: the strategy does not fit the number of ranks.
    """
    if isinstance(config, Single) and world_size > 1:
        message = f"none is for one process but {world_size} processes train together; choose ddp, fsdp or hsdp"
        raise ConfigError(Violation("distributed", message))
    if world_size % config.tensor_parallel:
        message = f"is {config.tensor_parallel} but must divide the {world_size} rank{'s' * (world_size > 1)}"
        raise ConfigError(Violation("distributed.tensor_parallel", message))
    dp_size = config.dp_size(world_size)
    if isinstance(config, HSDP) and dp_size % config.num_replicas:
        groups = f"group{'s' * (dp_size > 1)} of ranks" if config.tensor_parallel > 1 else f"rank{'s' * (dp_size > 1)}"
        message = f"is {config.num_replicas} but must divide the {dp_size} {groups}"
        raise ConfigError(Violation("distributed.num_replicas", message))
    shared: dict[str, Any] = {item.name: getattr(config, item.name) for item in fields(Distributed)}
    del shared["strategy"]
    if world_size == 1 and not (isinstance(config, FSDP) and config.cpu_offload):
        return Single(**shared)
    return config if isinstance(config, (Single, DDP, FSDP)) else FSDP(**shared)
