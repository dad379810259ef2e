"""Values of the configuration that are computed from others."""

from omegaconf import DictConfig, OmegaConf

from foundry.config.environment import detect
from foundry.config.launcher import tasks_of


def register_resolvers() -> None:
    """Register foundry's resolvers with OmegaConf."""
    OmegaConf.register_new_resolver("accum_freq", _accum_freq, replace=True)


def world_size(nproc_per_node: int) -> int:
    """Ranks of the run: from torchrun or Slurm where one of them started this process, else `nproc_per_node`."""
    environment = detect()
    return nproc_per_node if environment.launcher == "single" else environment.world_size


def _accum_freq(global_batch_size: int, per_gpu_batch_size: int, nproc_per_node: int, *, _root_: DictConfig) -> int:
    """Microbatches per rank and optimizer step; OmegaConf passes the whole configuration by the name it has here."""
    ranks = world_size(max(nproc_per_node, tasks_of(_root_)))
    return global_batch_size // max(1, per_gpu_batch_size * ranks)
