"""Optional methods of models."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, Protocol

from torch import Tensor, nn


class ModelHooks(Protocol):
    """Optional methods of a model. They are independent of each other, and a run works without any of them.

    This class is documentation and a type: models need not derive from it.
    """

    def get_fsdp_block_types(self) -> tuple[type[nn.Module], ...]:
        """Return types of repeating blocks that do not derive from `FSDPBlock`.

        Like `FSDPBlock`s, modules of these types are sharded, checkpointed and compiled separately.
        """
        ...

    def initial_weights(self) -> Mapping[str, Any] | None:
        """Return the initialization of each parameter, a `foundry.models.keyed_draws.Draw`, by parameter name.

        With this method each rank initializes only its own shards, and nothing is initialized on resume. If the method
        is missing or returns None, every rank first builds the whole model with the weights of its constructor. It is
        called before the model is wrapped, when its matrices may be on the meta device. Parameters that the mapping
        omits keep the constructor's values, which is allowed for vectors only.
        """
        ...

    def width_rules(self) -> Any:
        """Return the factors on learning rates by parameter name, a `foundry.models.parametrization.WidthRules`.

        Names are those before adapters are added; a parameter with another name has a factor of 1, as do all parameters
        of a model without this method.
        """
        ...

    def tensor_parallel_plan(self) -> Mapping[str, Enum]:
        """Return how to divide modules over tensor parallel ranks, by name or by a pattern such as `blocks.*.up`.

        `foundry.models.tensor_parallel.Split` lists the options; a model without this method cannot use tensor
        parallelism. A divided layer outputs local tensors. Every other parameter that FSDP2 shards is a DTensor in the
        forward pass, whole on each rank: read it with `foundry.core.sharded.local_part`.
        """
        ...

    def training_warning(self) -> str | None:
        """Return a one-line warning if this model trains differently from its author's version; None if it does not."""
        ...

    def flops_per_sample(self, seq_len: int) -> float:
        """Return the FLOPs of a forward and backward pass over one sample, for TFLOP/s and MFU.

        `seq_len` is not passed if the data has no tokens.
        """
        ...

    def export_state(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict with the tensor names of an export."""
        ...

    def hf_config(self) -> Any:
        """Return the `PreTrainedConfig` that matches `export_state`; with it, transformers can load an export."""
        ...

    def import_name(self, name: str) -> str:
        """Return this model's name for the tensor called `name` in an export or in transformers.

        Used by `model.init_from`.
        """
        ...

    def new_cache(self, length: int, padding: Tensor | None = None) -> Any:
        """Return a `foundry.models.kv_cache.Cache` for the argument `cache` of `forward`.

        If its `can_merge` is false, a prompt does not enter a batch before all prompts in the batch are finished.
        For a model without this method, each generated token needs a forward pass over the whole sequence.
        """
        ...


Name = Literal[
    "get_fsdp_block_types",
    "initial_weights",
    "width_rules",
    "tensor_parallel_plan",
    "training_warning",
    "flops_per_sample",
    "export_state",
    "hf_config",
    "import_name",
    "new_cache",
]


def hook(model: nn.Module, name: Name) -> Callable[..., Any] | None:
    """Return an optional method of a model; None if the model does not have it."""
    method: Callable[..., Any] | None = getattr(model, name, None)
    return method
