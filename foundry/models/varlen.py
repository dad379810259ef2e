"""Attention within concatenated documents, by torch's kernel for sequences of variable length."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.nn.attention.varlen

_HEAD_DIM_STEP, _LARGEST_HEAD_DIM = 8, 192
"""FlashAttention supports larger heads too, but on some GPUs without a backward pass."""
_MIN_CAPABILITY = (8, 0)
_KNOWS_GROUPED_HEADS = torch.__version__ >= "2.12"


@dataclass(frozen=True)
class DocumentBounds:
    """First tokens of the documents in a batch whose rows are concatenated.

    Attributes:
        starts: (documents + 1,) int32, the first token of each document, and after the last document the number of
            tokens. Documents of no tokens may stand at the end.
        longest: tokens of the longest document, or more.
    """

    starts: Tensor
    longest: int

    @classmethod
    def of_padded(cls, padding: Tensor, seq_len: int) -> "DocumentBounds":
        """Return the bounds of left-padded rows without waiting for the device; padding counts as a document.

        Args:
            padding: (batch,) int64, columns of padding of each row, less than `seq_len`.
            seq_len: columns of a row.
        """
        rows = torch.arange(len(padding) + 1, device=padding.device) * seq_len
        starts = torch.stack((rows[:-1], rows[:-1] + padding), dim=1).flatten()
        return cls(torch.cat((starts, rows[-1:])).int(), seq_len)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention within each document, whose memory is linear in the tokens.

        Args:
            query: (batch, heads, seq, head_dim); `has_kernel` is true for its device, type and head_dim.
            key: (batch, kv heads, seq, head_dim); `heads` is a multiple of `kv heads`.
            value: as `key`.

        Returns:
            (batch, heads, seq, head_dim).
        """
        groups = query.shape[1] // key.shape[1]
        options = {"enable_gqa": groups > 1} if _KNOWS_GROUPED_HEADS else {}
        if groups > 1 and not _KNOWS_GROUPED_HEADS:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        kernel: Any = torch.nn.attention.varlen.varlen_attn
        flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        bounds = (self.starts, self.starts, self.longest, self.longest)
        attended = kernel(*flat, *bounds, window_size=(-1, 0), **options)
        result: Tensor = attended.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)
        return result


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `DocumentBounds.attend` supports a device, a type and a size of heads.

    FlashAttention needs an NVIDIA GPU of compute capability 8.0 or more, float16 or bfloat16, and a multiple of 8 as
    `head_dim`.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    has_size = head_dim % _HEAD_DIM_STEP == 0 and head_dim <= _LARGEST_HEAD_DIM
    return device.type == "cuda" and is_half and has_size and _is_supported(device)


@cache
def _is_supported(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    import_module("torch.nn.attention.varlen")  # takes seconds, since it imports torch.compile's code
    return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
