"""Tensor-parallel plans of models, and operations on a vocabulary that is sharded over ranks.

Tensor parallelism as in Megatron-LM (Shoeybi et al., 2019, sections 3 and 4): a model declares how its matrices are
sharded, and `foundry.parallel.tensor_parallel` shards them. Ranks of a tensor-parallel group process the same samples.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from foundry.core.sharded import is_sharded, local_part


class Split(Enum):
    """How a module is sharded; a model's `tensor_parallel_plan()` returns one for each sharded module.

    Attributes:
        columns: a linear layer without bias, or an embedding, whose output features are sharded; its input is
            replicated.
        rows: a linear layer without bias whose input features are sharded; its outputs are summed over the ranks.
        vocabulary: an embedding, or a head that is not called as a module, whose entries are sharded; its weight is
            read with `VocabularyShard.of`.
        input: a module whose own parameters are not sharded. Its first argument is the input of several layers sharded
            by columns, so the gradient of this argument is summed once for all these layers.
    """

    columns = "columns"
    rows = "rows"
    vocabulary = "vocabulary"
    input = "input"


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's entries of a vocabulary that is sharded evenly over a group of ranks.

    The ranks hold identical hidden states and, after each sum or gather in this class, compute identical values. The
    gradient of a sum is therefore passed unchanged to each summand; only the gradient of the hidden states is summed
    over the ranks.

    Attributes:
        group: process group of the ranks.
        start: index of the first entry of this rank.
        size: number of entries of this rank.
    """

    group: ProcessGroup
    start: int
    size: int

    @classmethod
    def of(cls, head: Tensor) -> "tuple[Tensor, VocabularyShard | None]":
        """Return this rank's rows of a head's matrix (vocab, hidden_size), and its shard of the vocabulary.

        The shard is None if the matrix is not sharded.
        """
        if not is_sharded(head):
            return head, None
        assert head.device_mesh.ndim == 1, "FSDP2 gathers its shards before the head is used"
        local, group = head.to_local(), head.device_mesh.get_group()
        return local, cls(group, group.rank() * len(local), len(local))

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each target in this rank's entries, and whether this rank holds the target.

        The index is 0 for targets that other ranks hold.
        """
        places = targets - self.start
        is_own = (places >= 0) & (places < self.size)
        return places.where(is_own, 0), is_own

    def highest_(self, values: Tensor) -> Tensor:
        """Replace values by their maximum over the ranks, in place and without gradient."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum_(self, values: Tensor) -> Tensor:
        """Replace values by their sum over the ranks, in place and without gradient."""
        dist.all_reduce(values, group=self.group)
        return values

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the argmax over the whole vocabulary, (tokens, 1) int64, given this rank's (tokens, size) logits."""
        local_max, places = logits.max(-1, keepdim=True)
        is_highest = local_max == self.highest_(local_max.clone())
        first = (places + self.start).where(is_highest, torch.iinfo(torch.int64).max)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
        return first

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the hidden states unchanged; in the backward pass their gradient is summed over the ranks."""
        return cast(Tensor, _Enter.apply(hidden, self.group))  # type: ignore[no-untyped-call]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks; differentiable."""
        return cast(Tensor, _Sum.apply(values, self))  # type: ignore[no-untyped-call]

    def gather(self, logits: Tensor) -> Tensor:
        """Gather (..., size) logits of all ranks into (..., vocab); differentiable."""
        return cast(Tensor, _Gather.apply(logits, self))  # type: ignore[no-untyped-call]


def embed_divided(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Look up tokens, (...) int64, in an embedding whose entries are sharded over ranks; returns (..., hidden_size).

    DTensor's own embedding materializes the gradient of all entries on each rank.
    """
    weight, shard = VocabularyShard.of(embedding.weight)
    assert shard is not None, "the embedding is whole"
    places, is_own = shard.find(tokens)
    return shard.sum(F.embedding(places, weight).masked_fill(~is_own[..., None], 0.0))


def embed_columns(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Look up tokens, (...) int64, in an embedding whose features are sharded; returns this rank's (..., features)."""
    return F.embedding(tokens, local_part(embedding.weight))


def replicated_weight(weight: Tensor, divided: Tensor) -> Tensor:
    """Return a replicated weight that each rank applies to its own heads.

    In the backward pass, the gradient is summed over the ranks. Without tensor parallelism the weight is returned
    unchanged.

    Args:
        weight: weight of any shape; a DTensor, or a plain tensor if FSDP2 does not shard it either.
        divided: matrix that is sharded over the heads, whose mesh has the ranks.
    """
    if not is_sharded(divided):
        return weight
    group = divided.device_mesh.get_group()
    return cast(Tensor, _Enter.apply(local_part(weight), group))  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: VocabularyShard) -> Tensor:
        return shard.sum_(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.shard = shard
        parts = [torch.empty_like(logits, memory_format=torch.contiguous_format) for _ in range(shard.group.size())]
        dist.all_gather(parts, logits.contiguous(), group=shard.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.shard.start, ctx.shard.size), None
