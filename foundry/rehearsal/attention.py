"""Selection of attention kernels as in a CUDA build of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_flash_attention_forward": "varlen",
    "torch_attn::_varlen_attn": "varlen",
}
"""Operations that run one attention kernel each, mapped to the name of the kernel."""

_LARGEST_FLASH_HEAD = 256


def attention_on_cuda(original: Callable[..., Tensor], on_math: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    """Return a `scaled_dot_product_attention` that selects kernels for CUDA tensors as a CUDA build of torch does.

    The selection follows `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`: flash attention for half precision
    without a mask and heads of up to 256 numbers, grouped or not; else memory-efficient attention for equal numbers of
    query and key heads; else the plain formula, also if the head size is no multiple of 8 (4 in fp32). A build of torch
    without CUDA always selects the formula.

    Args:
        original: torch's function, which is still used for tensors on the CPU.
        on_math: called with the query if the plain formula is selected; every other kernel is an operation of torch.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"scale": scale}
        if query.device.type == "cuda":
            is_half_precision = query.dtype in (torch.bfloat16, torch.float16)
            head = query.shape[-1]
            if is_half_precision and attn_mask is None and head <= _LARGEST_FLASH_HEAD and head % 8 == 0:
                flash = aten._scaled_dot_product_flash_attention
                result: Tensor = flash(query, key, value, dropout_p, is_causal, False, **options)[0]
                return result
            if query.shape[1] == key.shape[1] and head % (8 if is_half_precision else 4) == 0:
                bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
                keeps_log_sums = any(tensor.requires_grad for tensor in (query, key, value))
                efficient = aten._scaled_dot_product_efficient_attention
                result = efficient(query, key, value, bias, keeps_log_sums, dropout_p, is_causal, **options)[0]
                return result
            on_math(query)
        return original(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, **options)

    return attend


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as a bias for the scores, (batch, heads, query tokens, key tokens)."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
