"""What of a model is divided among ranks that share their samples, and a vocabulary that is.

Tensor parallelism as in Megatron-LM (Shoeybi et al., 2019, sections 3 and 4): a model says how its matrices are cut,
and `foundry.parallel.tensor_parallel` cuts them.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from foundry.core.sharded import is_sharded


class Split(Enum):
    """How a module is divided; a model's `tensor_parallel_plan()` names one for each that is.

    Attributes:
        columns: a linear layer without a bias whose output features are divided; its input is whole.
        rows: a linear layer without a bias whose input features are divided; its outputs are summed.
        vocabulary: the entries of an embedding, or of a head whose matrix is read by `VocabularyShard.of` and which is
            not called.
        input: nothing of the module's own: its first argument goes to several layers divided by columns, so that its
            gradient is summed once for all of them.
    """

    columns = "columns"
    rows = "rows"
    vocabulary = "vocabulary"
    input = "input"


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's entries of a vocabulary that is divided evenly over a group of ranks.

    The ranks hold the same hidden states, and from what is summed or gathered here on all compute the same. So the
    gradient of a sum is that of each summand, and only that of the hidden states is itself a sum over the ranks.

    Attributes:
        group: the ranks.
        start: the first of the entries.
        size: how many they are.
    """

    group: ProcessGroup
    start: int
    size: int

    @classmethod
    def of(cls, head: Tensor) -> "tuple[Tensor, VocabularyShard | None]":
        """This rank's rows of a head's matrix (vocab, hidden_size), and which they are; None where they are all."""
        if not is_sharded(head):
            return head, None
        assert head.device_mesh.ndim == 1, "what FSDP2 has divided it gathers before it is used"
        local, group = head.to_local(), head.device_mesh.get_group()
        return local, cls(group, group.rank() * len(local), len(local))

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Where among its entries targets are, 0 for those of other ranks, and whether they are its own."""
        places = targets - self.start
        is_own = (places >= 0) & (places < self.size)
        return places.where(is_own, 0), is_own

    def highest_(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, in place and without a gradient."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place and without a gradient."""
        dist.all_reduce(values, group=self.group)
        return values

    def argmax(self, logits: Tensor) -> Tensor:
        """(tokens, 1) int64, the entry of the whole vocabulary that is likeliest, given (tokens, size) logits."""
        own, places = logits.max(-1, keepdim=True)
        is_highest = own == self.highest_(own.clone())
        first = (places + self.start).where(is_highest, torch.iinfo(torch.int64).max)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
        return first

    def enter(self, hidden: Tensor) -> Tensor:
        """The same hidden states, to be projected onto this rank's entries: their gradient is summed over the ranks."""
        return cast(Tensor, _Enter.apply(hidden, self))  # type: ignore[no-untyped-call]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, differentiable."""
        return cast(Tensor, _Sum.apply(values, self))  # type: ignore[no-untyped-call]

    def gather(self, logits: Tensor) -> Tensor:
        """(..., vocab) of (..., size) each, differentiable."""
        return cast(Tensor, _Gather.apply(logits, self))  # type: ignore[no-untyped-call]


def embed_divided(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """The forward pass of an embedding whose entries are divided: (..., hidden_size) of tokens (...) int64.

    DTensor's own makes the gradient of all entries on each rank.
    """
    weight, shard = VocabularyShard.of(embedding.weight)
    assert shard is not None, "the embedding is whole"
    places, is_own = shard.find(tokens)
    return shard.sum(F.embedding(places, weight).masked_fill(~is_own[..., None], 0.0))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.shard = shard
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum_(grad.clone(memory_format=torch.contiguous_format)), None


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
