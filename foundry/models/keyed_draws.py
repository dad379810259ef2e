"""Weight initialization keyed by seed, parameter name and element index: any slice has the same bits on every rank.

Philox (Salmon et al., 2011) hashes a key and a counter. The key holds the seed and the parameter name; the counter is
the place in the flattened tensor. A rank therefore generates only the rows of its own shards, for any sharding.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foundry.core.sharded import is_fake

_BLOCK = 2**16
"""Number of values computed together.

Fixed, because vectorized functions may round the tail of a shorter array differently.
"""

_COUNTERS = _BLOCK // 8
"""Steps of Philox's counter per block: a step gives 256 bits, and a value takes 32."""

_PIECE = 2**22
"""Maximum number of values in a temporary tensor while a tensor is filled, unless a single row has more."""


@dataclass(frozen=True)
class Normal:
    """N(0, std²). `zero_row`, if set, is the index of a row of zeros, such as the padding row of an embedding."""

    std: float
    zero_row: int | None = None


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution from -bound to bound."""

    bound: float

    @classmethod
    def xavier(cls, fan_in: float, fan_out: float) -> "Uniform":
        """Return the distribution with variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010)."""
        return cls(math.sqrt(6.0 / (fan_in + fan_out)))


@dataclass(frozen=True)
class Constant:
    """The same value for every element."""

    value: float


Compute = Callable[[Tensor], Tensor]
"""Maps a block of random words, (2, _BLOCK / 2) int32, to values, (_BLOCK,) float32."""

Draw = Normal | Uniform | Constant
"""Initialization of a parameter; `ModelHooks.initial_weights` returns one for each parameter name."""


@dataclass(frozen=True)
class Part:
    """The slice of a tensor to initialize.

    Attributes:
        target: tensor filled in place, of any floating-point dtype, on any device.
        shape: shape of the whole tensor.
        offsets: start of `target` in the whole tensor, per dimension.
    """

    target: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "Part":
        """Return the part that covers a whole tensor."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)


@torch.no_grad()
def draw_parts(draws: Mapping[str, Draw], parts: Mapping[str, Part], seed: int) -> None:
    """Initialize slices of parameters in place.

    Args:
        draws: initialization by parameter name.
        parts: slices by parameter name. Parameters missing from `draws` keep their values; fake tensors are skipped.
        seed: seed of the random values.
    """
    for name, part in parts.items():
        if is_fake(part.target):
            continue
        match draws.get(name):
            case Constant(value):
                part.target.fill_(value)
            case Uniform(bound):
                _fill(part, _RandomWords(seed, name), _uniform, bound)
            case Normal(std, zero_row):
                _fill(part, _RandomWords(seed, name), _normal, std)
                if zero_row is not None and 0 <= (row := zero_row - part.offsets[0]) < part.target.shape[0]:
                    part.target[row] = 0.0


def _fill(part: Part, words: "_RandomWords", compute: Compute, scale: float) -> None:
    """Fill a part with its slice of the whole tensor's random values, times `scale`; a few rows at a time."""
    target, shape, offsets = part.target, part.shape, part.offsets
    if target.ndim == 0 or (target.shape[1:] == shape[1:] and target.is_contiguous()):  # contiguous in the flat tensor
        row = math.prod(shape[1:])
        target, shape, offsets = target.view(-1), (math.prod(shape),), (offsets[0] * row if offsets else 0,)
    row = math.prod(shape[1:])
    columns = tuple(slice(o, o + size) for o, size in zip(offsets[1:], target.shape[1:], strict=True))
    step = max(1, _PIECE // max(1, row))
    for first in range(0, len(target), step):
        count = min(step, len(target) - first)
        start = (offsets[0] + first) * row
        numbers = words.numbers(start, start + count * row, compute).mul_(scale).view(count, *shape[1:])
        target[first : first + count].copy_(numbers[(slice(None), *columns)])


class _RandomWords:
    """Generator of the random 32-bit words of one parameter, block by block."""

    def __init__(self, seed: int, name: str) -> None:
        key = np.frombuffer(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), dtype="<u8")
        self._philox = np.random.Philox(key=key, counter=0)
        self._state: Any = self._philox.state

    def numbers(self, start: int, stop: int, compute: Compute) -> Tensor:
        """Apply `compute` to the words at flat indices `start` to `stop`; returns (stop - start,) float32."""
        numbers = torch.empty(stop - start)
        for block, words in self._blocks(start // _BLOCK, -(-stop // _BLOCK)):
            first, last = max(start, block * _BLOCK), min(stop, (block + 1) * _BLOCK)
            numbers[first - start : last - start] = compute(words)[first - block * _BLOCK : last - block * _BLOCK]
        return numbers

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the random words, (2, _BLOCK / 2) int32, of each block."""
        counter = first * _COUNTERS
        self._state["state"]["counter"][:] = (counter % 2**64, counter // 2**64, 0, 0)
        self._state["buffer_pos"] = 4  # discard words buffered for an earlier counter
        self._philox.state = self._state
        for block in range(first, last):
            yield block, torch.from_numpy(self._philox.random_raw(_BLOCK // 2).view(np.int32)).view(2, -1)


def _uniform(words: Tensor) -> Tensor:
    """Map words to (_BLOCK,) float32, uniform from -1 to 1."""
    return words.flatten().float().mul_(2.0**-31)


def _normal(words: Tensor) -> Tensor:
    """Map words to (_BLOCK,) float32, standard normal (Box and Muller, 1958); absolute values are at most 6.7."""
    radius = (words[0] & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).log_().mul_(-2.0).sqrt_()
    angle = words[1].float().mul_(math.pi * 2.0**-31)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])
