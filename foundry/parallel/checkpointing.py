"""Recomputing a block's activations in the backward pass: all of them, or all but the expensive ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten

SAVED_OPS = [
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
"""Whose outputs selective checkpointing keeps: they take most of a block's time. Not `bmm`, which is attention written
out, whose scores grow with the square of the sequence. Norms, activation functions, rotations, casts and sums are
computed again."""


def checkpointed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    """A block's forward pass, of which the backward pass computes again what it needs.

    Args:
        forward: of the block.
        selective: keep the outputs of `SAVED_OPS`; else nothing but the block's inputs is kept.
    """
    options = {"context_fn": partial(create_selective_checkpoint_contexts, SAVED_OPS)} if selective else {}
    return partial(_checkpointed, forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
