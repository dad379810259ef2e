"""Low-rank adapters (Hu et al., 2021): which layers have one, and their weights with it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

_NO_ALIASES: Mapping[str, Sequence[str]] = {}


def match_targets(
    names: Iterable[str], patterns: Iterable[str], aliases: Mapping[str, Sequence[str]] = _NO_ALIASES
) -> list[str]:
    """The full names of the layers that patterns choose, in the order of `names`.

    A pattern is the last part of a dotted name, as it is, or wildcards for all of it: in `*.layers.1.*.q_proj` the
    dots are dots, so that layers 10 to 19 are not meant.

    Args:
        names: dotted names of the layers that can have an adapter.
        patterns: of which one must fit.
        aliases: other names for a last part, such as `linear_qkv` for `q_proj`, `k_proj` and `v_proj`.
    """
    wanted = [name for pattern in patterns for name in _without_aliases(pattern, aliases)]
    return [name for name in names if any(_fits(name, pattern) for pattern in wanted)]


def scaling(alpha: float, rank: int, *, rslora: bool = False) -> float:
    """What the product of the two matrices is multiplied by: alpha / rank, or alpha / √rank (Kalajdzievski, 2023)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def merged(weight: Tensor, a: Tensor, b: Tensor, *, alpha: float, rslora: bool = False) -> Tensor:
    """The matrix of a layer and its adapter in one: weight + scaling x B A, in the dtype of `weight`.

    The sum is made in float32 at least and rounded once: in bfloat16 most of a small adapter would be lost.

    Args:
        weight: (out_features, in_features).
        a: (rank, in_features).
        b: (out_features, rank).
        alpha: scale of the adapter.
        rslora: scale by the root of the rank.
    """
    dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    delta = scaling(alpha, a.shape[0], rslora=rslora) * (b.to(dtype) @ a.to(dtype))
    return (weight.to(dtype) + delta).to(weight.dtype)


def _fits(name: str, pattern: str) -> bool:
    return name.rpartition(".")[2] == pattern or fnmatchcase(name, pattern)


def _without_aliases(pattern: str, aliases: Mapping[str, Sequence[str]]) -> list[str]:
    """The pattern, and with each name for which its last part stands."""
    start, dot, leaf = pattern.rpartition(".")
    return [pattern, *(f"{start}{dot}{name}" for name in aliases.get(leaf, ()))]
