"""Initial weights keyed by seed, parameter and element: any part of a tensor has the same bits whoever draws it.

Philox (Salmon et al., 2011) is a hash of a key and a counter. The key holds the seed and the parameter's name, the
counter counts blocks of the flattened tensor, so that a rank draws what it holds and nothing else, however it is cut.
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
"""Numbers that are computed together: vectorised functions may round the end of a shorter array in another way."""

_COUNTERS = _BLOCK // 8
"""Steps of Philox's counter in a block: each gives 256 bits, a number takes 32."""

_PIECE = 2**22
"""Numbers that exist at a time besides the tensor itself."""


@dataclass(frozen=True)
class Normal:
    """N(0, std²); the row `zero_row` of the tensor, where given, is zero: that of an embedding's padding."""

    std: float
    zero_row: int | None = None


@dataclass(frozen=True)
class Uniform:
    """Uniform from -bound to bound."""

    bound: float

    @classmethod
    def xavier(cls, fan_in: int, fan_out: int) -> "Uniform":
        """Of the variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010)."""
        return cls(math.sqrt(6.0 / (fan_in + fan_out)))


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float


Compute = Callable[[Tensor], Tensor]
"""Numbers, (_BLOCK,) float32, of a block of random words, (2, _BLOCK / 2) int32."""

Draw = Normal | Uniform | Constant
"""How a parameter is drawn; what `ModelHooks.initial_weights` gives for each name."""


@dataclass(frozen=True)
class Part:
    """What is to be drawn of a tensor.

    Attributes:
        target: filled in place, of any floating-point type and on any device.
        shape: of the whole.
        offsets: where `target` begins in the whole, one number per dimension.
    """

    target: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> "Part":
        """All of a tensor."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)


@torch.no_grad()
def draw_parts(draws: Mapping[str, Draw], parts: Mapping[str, Part], seed: int) -> None:
    """Draw parts of parameters in place.

    Args:
        draws: by the parameter's name.
        parts: by the same; names that `draws` lacks keep what they have, and fake tensors have no numbers.
        seed: of the run.
    """
    for name, part in parts.items():
        if is_fake(part.target):
            continue
        match draws.get(name):
            case Constant(value):
                part.target.fill_(value)
            case Uniform(bound):
                _fill(part, _Words(seed, name), _uniform, bound)
            case Normal(std, zero_row):
                _fill(part, _Words(seed, name), _normal, std)
                if zero_row is not None and 0 <= (row := zero_row - part.offsets[0]) < part.target.shape[0]:
                    part.target[row] = 0.0


def _fill(part: Part, words: "_Words", compute: Compute, scale: float) -> None:
    """Fill a part with numbers of the whole tensor times `scale`, some rows at a time."""
    target, shape, offsets = part.target, part.shape, part.offsets
    if target.ndim == 0 or (target.shape[1:] == shape[1:] and target.is_contiguous()):  # one run of the flat tensor
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


class _Words:
    """The random 32-bit words of one parameter, block by block."""

    def __init__(self, seed: int, name: str) -> None:
        key = np.frombuffer(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), dtype="<u8")
        self._philox = np.random.Philox(key=key, counter=0)
        self._state: Any = self._philox.state

    def numbers(self, start: int, stop: int, compute: Compute) -> Tensor:
        """What `compute` makes of the words at flat indices from `start` to `stop`: (stop - start,) float32."""
        found = torch.empty(stop - start)
        for block, words in self._blocks(start // _BLOCK, -(-stop // _BLOCK)):
            first, last = max(start, block * _BLOCK), min(stop, (block + 1) * _BLOCK)
            found[first - start : last - start] = compute(words)[first - block * _BLOCK : last - block * _BLOCK]
        return found

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """(2, _BLOCK / 2) int32 for each block."""
        counter = first * _COUNTERS
        self._state["state"]["counter"][:] = (counter % 2**64, counter // 2**64, 0, 0)
        self._state["buffer_pos"] = 4  # nothing is left of an earlier counter
        self._philox.state = self._state
        for block in range(first, last):
            yield block, torch.from_numpy(self._philox.random_raw(_BLOCK // 2).view(np.int32)).view(2, -1)


def _uniform(words: Tensor) -> Tensor:
    """(_BLOCK,) float32 from -1 to 1."""
    return words.flatten().float().mul_(2.0**-31)


def _normal(words: Tensor) -> Tensor:
    """(_BLOCK,) float32, standard normal (Box and Muller, 1958); none is beyond 6.7."""
    radius = (words[0] & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).log_().mul_(-2.0).sqrt_()
    angle = words[1].float().mul_(math.pi * 2.0**-31)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])
