"""Writer of weights in transformers' format: safetensors files of at most 5 GB with an index, one tensor at a time."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foundry.checkpoint.shard import DTYPES

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9

# Order of dtypes in a file, as in safetensors itself, so that every tensor is aligned to its dtype.
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")


@dataclass(frozen=True)
class Weight:
    """A tensor to write.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype in the file.
        read: called with an empty tensor of that shape and dtype, which it fills with the values.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[Tensor], object]

    @classmethod
    def from_tensor(cls, tensor: Tensor, dtype: torch.dtype) -> "Weight":
        """Return a `Weight` for a tensor in memory, to be written as `dtype`."""
        return cls(tensor.shape, dtype, lambda target: target.copy_(tensor.detach()))

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.shape.numel() * self.dtype.itemsize


def write_weights(out: Path, weights: Mapping[str, Weight], *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write model.safetensors, or several files with an index, filled in the order of `weights`.

    Args:
        out: the output folder.
        weights: weights by name.
        max_file_bytes: maximum size of the tensors in a file; a larger tensor gets its own file.
    """
    files, room = list[dict[str, Weight]](), 0
    for name, weight in weights.items():
        if not files or (weight.num_bytes > room and files[-1]):
            files.append({})
            room = max_file_bytes
        files[-1][name] = weight
        room -= weight.num_bytes
    if len(files) <= 1:
        _write_file(out / WEIGHTS, weights)
        return
    weight_map = dict[str, str]()
    for number, file_weights in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(out / file, file_weights)
        weight_map |= dict.fromkeys(file_weights, file)
    sizes = {
        "total_parameters": sum(weight.shape.numel() for weight in weights.values()),
        "total_size": sum(weight.num_bytes for weight in weights.values()),
    }
    index = {"metadata": sizes, "weight_map": weight_map}
    (out / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def _write_file(file: Path, weights: Mapping[str, Weight]) -> None:
    """Write the same bytes as safetensors' `save_file`; https://github.com/huggingface/safetensors#format."""
    names = sorted(weights, key=lambda name: (_ORDER.index(DTYPES[weights[name].dtype]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        weight = weights[name]
        end = begin + weight.num_bytes
        header[name] = {"dtype": DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = torch.empty(weights[name].shape, dtype=weights[name].dtype)
            weights[name].read(tensor)
            stream.write(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
            del tensor  # free the memory before the next tensor is allocated
