"""Attention within concatenated documents, with PyTorch's kernel for variable-length sequences."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.nn.attention.varlen

_HEAD_DIM_STEP, _LARGEST_HEAD_DIM = 8, 192
"""Required divisor and maximum of `head_dim`; some GPUs lack FlashAttention's backward pass for larger heads."""
_MIN_CAPABILITY = (8, 0)
_SUPPORTS_GROUPED_HEADS = torch.__version__ >= "2.12"


@dataclass(frozen=True)
class DocumentBounds:
    """Bounds of the documents in a batch whose rows are concatenated.

    Attributes:
        starts: (documents + 1,) int32, first token of each document, followed by the total number of tokens. Empty
            documents are allowed at the end.
        longest: length of the longest document in tokens, or an upper bound.
    """

    starts: Tensor
    longest: int

    @classmethod
    def of_padded(cls, padding: Tensor, seq_len: int) -> "DocumentBounds":
        """Return the bounds of left-padded rows without a device synchronization.

        The padding of a row counts as a document.

        Args:
            padding: (batch,) int64, padding columns of each row, fewer than `seq_len`.
            seq_len: columns of a row.
        """
        rows = torch.arange(len(padding) + 1, device=padding.device) * seq_len
        starts = torch.stack((rows[:-1], rows[:-1] + padding), dim=1).flatten()
        return cls(torch.cat((starts, rows[-1:])).int(), seq_len)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_bounds: "DocumentBounds | None" = None) -> Tensor:
        """Compute causal attention within each document, with memory linear in the number of tokens.

        Args:
            query: (batch, heads, seq, head_dim); `has_kernel` must be true for its device, dtype and head_dim.
            key: (batch, kv heads, keys, head_dim); `heads` must be a multiple of `kv heads`.
            value: same shape as `key`.
            key_bounds: bounds of the documents in the keys. A document may have more keys than queries; its queries
                are then at the last of these positions. None if keys and queries have the same bounds.

        Returns:
            (batch, heads, seq, head_dim).
        """
        groups = query.shape[1] // key.shape[1]
        options = {"enable_gqa": groups > 1} if _SUPPORTS_GROUPED_HEADS else {}
        if groups > 1 and not _SUPPORTS_GROUPED_HEADS:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        kernel: Any = torch.nn.attention.varlen.varlen_attn
        flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        keys = self if key_bounds is None else key_bounds
        output = kernel(*flat, self.starts, keys.starts, self.longest, keys.longest, window_size=(-1, 0), **options)
        result: Tensor = output.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)
        return result


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `DocumentBounds.attend` supports this device, dtype and head size.

    It needs FlashAttention on an NVIDIA GPU of compute capability 8.0 or higher, float16 or bfloat16, and a `head_dim`
    that is a multiple of 8 and at most 192.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    has_size = head_dim % _HEAD_DIM_STEP == 0 and head_dim <= _LARGEST_HEAD_DIM
    return device.type == "cuda" and is_half and has_size and _is_supported(device)


@cache
def _is_supported(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    import_module("torch.nn.attention.varlen")  # takes seconds, because it imports the code of torch.compile
    return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
