"""`distributed=`: how many processes train together and what each holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from foundry.config.errors import Violation
from foundry.config.setting import setting

_DEFAULT_BUCKET_MB = 25.0


class Strategy(Enum):
    """What each rank holds."""

    auto = "auto"
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class GradientSync(Enum):
    """When gradients are reduced over ranks within an accumulation window."""

    every = "every"
    last = "last"
    last_keep_params = "last_keep_params"


class Backend(Enum):
    """The library that moves tensors between ranks."""

    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """How processes start and find each other. Under torchrun or Slurm their number comes from the environment."""

    strategy: Strategy = setting(Strategy.auto, "auto: none on one process, fsdp on several")
    nproc_per_node: int = setting(
        1,
        "processes to start on this machine; leave at 1 under torchrun and Slurm",
        ge=1,
        le=1024,
        aliases="devices, num_gpus, gpus, num_processes",
    )
    backend: Backend = setting(Backend.auto, "auto: nccl on GPUs, gloo on CPUs", source="dist_backend")
    init_method: str = setting("env://", "where ranks meet: env:// or tcp://host:port", source="dist_url")
    timeout_seconds: float = setting(
        600.0,
        "a collective that takes longer ends the run, naming rank and step",
        gt=0,
        le=10**7,
        aliases="dist_timeout",
    )
    gradient_sync: GradientSync = setting(
        GradientSync.last,
        "every: after each microbatch, least memory; last: once a step; last_keep_params: once, weights kept gathered",
    )


@dataclass(frozen=True, kw_only=True)
class Single(Distributed):
    """One process."""

    strategy: Strategy = Strategy.none


@dataclass(frozen=True, kw_only=True)
class DDP(Distributed):
    """Every rank holds the whole model; gradients are averaged."""

    strategy: Strategy = Strategy.ddp
    overlap_grad_reduce: bool = setting(True, "reduce gradients in buckets while the backward pass still runs")
    bucket_cap_mb: float = setting(_DEFAULT_BUCKET_MB, "size of a gradient bucket in MiB", gt=0, le=10**6)
    shard_optimizer: bool = setting(
        False, "each rank keeps and updates one shard of the optimizer state", source="use_distributed_optimizer"
    )
    overlap_param_gather: bool = setting(False, "with shard_optimizer: gather the next block's weights during compute")

    def check(self) -> Iterator[Violation]:
        """Say which fields would be ignored in this combination."""
        if self.overlap_param_gather and not self.shard_optimizer:
            message = "is true but there is nothing to gather without shard_optimizer=true; set that, or drop this"
            yield Violation("distributed.overlap_param_gather", message)
        elif self.overlap_param_gather and not self.overlap_grad_reduce:
            message = "is true but needs overlap_grad_reduce=true: both work block by block"
            yield Violation("distributed.overlap_param_gather", message)
        if self.bucket_cap_mb != _DEFAULT_BUCKET_MB and (self.shard_optimizer or not self.overlap_grad_reduce):
            reason = (
                "shard_optimizer reduces block by block" if self.shard_optimizer else "overlap_grad_reduce is false"
            )
            yield Violation(
                "distributed.bucket_cap_mb", f"is {self.bucket_cap_mb:g} but {reason}, without buckets; drop it"
            )


@dataclass(frozen=True, kw_only=True)
class FSDP(Distributed):
    """FSDP2: weights, gradients and optimizer state are sharded over all ranks."""

    strategy: Strategy = Strategy.fsdp
    reshard_after_forward: bool = setting(
        True,
        "free gathered weights after forward: less memory, one more all-gather",
        source="fsdp_reshard_after_forward",
    )
    cpu_offload: bool = setting(
        False, "keep weights, gradients and optimizer state in host memory", source="fsdp_cpu_offload"
    )
    overlap_param_gather: bool = setting(True, "gather the next block's weights while this one computes")


@dataclass(frozen=True, kw_only=True)
class HSDP(FSDP):
    """FSDP2 within groups of ranks, replicas between groups."""

    strategy: Strategy = Strategy.hsdp
    num_replicas: int = setting(2, "groups that each hold a full copy; must divide the world size", ge=1, le=10**6)
