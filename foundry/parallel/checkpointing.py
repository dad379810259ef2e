"""Recomputing a block's activations in the backward pass: all of them, or all but the expensive ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten

_SAVED_OPS = [
    # Matrix products: each layer's projections, without and with a bias, in float8.
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    # Convolutions, of patches of images.
    _aten.convolution.default,
    # Attention in one kernel, as each backend of `scaled_dot_product_attention` is called.
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
_SAVED_BY_NAME = frozenset({"torch_attn::_varlen_attn"})
"""Attention of packed rows, an operator that does not exist until `torch.nn.attention.varlen` is imported."""


def is_saved(operator: Any) -> bool:
    """Return whether selective checkpointing keeps the outputs of an operator (an `OpOverload`).

    It keeps those of operators that take most of a block's time. `bmm` is left out, because it is attention written
    out, whose scores grow with the square of the sequence. Norms, activation functions, rotations, casts and sums are
    computed again.
    """
    return operator in _SAVED_OPS or str(operator.name()) in _SAVED_BY_NAME


def checkpointed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    """A block's forward pass, of which the backward pass computes again what it needs.

    Args:
        forward: of the block.
        selective: keep the outputs of operators for which `is_saved` is true; else nothing but the block's inputs is
            kept.
    """
    options = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    return partial(_checkpointed, forward, options)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
