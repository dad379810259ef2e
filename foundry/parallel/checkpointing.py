"""Activation checkpointing of blocks: recompute all activations in the backward pass, or only the cheap ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten

_SAVED_OPS = [
    # Matrix products of linear layers: without bias, with bias, and in float8.
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    # Convolutions, as in patch embeddings.
    _aten.convolution.default,
    # Fused attention, one operator per backend of `scaled_dot_product_attention`.
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
_SAVED_BY_NAME = frozenset({"torch_attn::_varlen_attn"})
"""Attention of packed rows; the operator does not exist until `torch.nn.attention.varlen` is imported."""


def is_saved(operator: Any) -> bool:
    """Return whether selective checkpointing saves the outputs of an operator (an `OpOverload`).

    The selected operators take most of a block's time. `bmm` is excluded because it is used in unfused attention, whose
    scores grow with the square of the sequence length. Norms, activation functions, rotary embeddings, casts and sums
    are recomputed.
    """
    return operator in _SAVED_OPS or str(operator.name()) in _SAVED_BY_NAME


def checkpointed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    """Return a block's forward function with activation checkpointing.

    Args:
        forward: forward method of the block.
        selective: save the outputs of operators selected by `is_saved`; False saves only the inputs of the block.
    """
    options = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    return partial(_run_checkpointed, forward, options)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _run_checkpointed(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
