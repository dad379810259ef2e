"""What a model may answer besides its forward pass."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, Protocol

from torch import Tensor, nn


class ModelHooks(Protocol):
    """The optional methods of a model; each stands by itself, and where one is missing the run does without it.

    This is documentation and a type: nothing has to derive from it.
    """

    def get_fsdp_block_types(self) -> tuple[type[nn.Module], ...]:
        """The types of repeating blocks that do not derive from `FSDPBlock`: sharded, checkpointed, compiled alone."""
        ...

    def initial_weights(self) -> Mapping[str, Any] | None:
        """How each parameter is drawn from scratch, by its name, a `foundry.models.keyed_draws.Draw`.

        With it each rank draws only what it holds, and nothing is drawn on resume; without it, or where it is None,
        every rank builds the whole model first, with the weights that its constructor gives it. Called before the model
        is wrapped; its matrices may be on the meta device. Parameters that it does not name keep the constructor's
        values, which is for vectors only.
        """
        ...

    def tensor_parallel_plan(self) -> Mapping[str, Enum]:
        """How modules are divided over ranks that share their samples, by name or by a pattern such as `blocks.*.up`.

        `foundry.models.tensor_parallel.Split` says what there is; without it a run refuses tensor parallelism. A layer
        that is divided gives local tensors. Every other parameter that FSDP2 shards is a DTensor in the forward pass,
        whole on each rank: read it by `foundry.core.sharded.local_part`.
        """
        ...

    def training_warning(self) -> str | None:
        """Say in a line how training this model differs from its author's; None if it does not."""
        ...

    def flops_per_sample(self, seq_len: int) -> float:
        """FLOPs of a forward and backward pass over one sample, for FLOP/s and MFU; no argument without tokens."""
        ...

    def export_state(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state under the names that an export has."""
        ...

    def hf_config(self) -> Any:
        """The `PreTrainedConfig` that `export_state` fits; with it an export is one that transformers loads."""
        ...

    def import_name(self, name: str) -> str:
        """This model's name of a tensor that an export, or transformers, calls `name`; for `model.init_from`."""
        ...

    def new_cache(self, length: int, padding: Tensor | None = None) -> Any:
        """A `foundry.models.kv_cache.Cache` that `forward` takes as `cache`; without it each token reads all others."""
        ...


Name = Literal[
    "get_fsdp_block_types",
    "initial_weights",
    "tensor_parallel_plan",
    "training_warning",
    "flops_per_sample",
    "export_state",
    "hf_config",
    "import_name",
    "new_cache",
]


def hook(model: nn.Module, name: Name) -> Callable[..., Any] | None:
    """A model's optional method; None where it has none."""
    method: Callable[..., Any] | None = getattr(model, name, None)
    return method
