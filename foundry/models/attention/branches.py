"""Attention and positions for rows whose sequences share prefixes, which are computed once."""

import inspect
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundry.models.attention.kernel import attend
from foundry.models.attention.varlen import DocumentBounds, has_kernel


class Branches:
    """Layout of a single row: first prefixes, then branches. Each branch continues one prefix.

    The tokens of a branch attend to their prefix, and causally to the branch. Their positions follow the positions of
    the prefix. The outputs equal the outputs of separate rows that repeat the prefix.

    Args:
        prefix_lengths: (prefixes,) int64 in host memory, tokens of each prefix; 0 is allowed.
        branches: (branches, 2) int64 in host memory, index of the prefix and number of tokens of each branch. A
            branch has at least 1 token.
        device: device of the model.

    Attributes:
        longest: tokens of the longest branch with its prefix.
        positions: (1, tokens) int64, position of each token in its prefix, or in its branch with the prefix.
    """

    def __init__(self, prefix_lengths: Tensor, branches: Tensor, device: torch.device) -> None:
        self._prefix_lengths, (self._prefixes, self._lengths) = prefix_lengths, branches.unbind(1)
        self._offsets, self._device = prefix_lengths[self._prefixes], device
        self.longest = int((self._offsets + self._lengths).max())
        first_positions = torch.cat((torch.zeros_like(prefix_lengths), self._offsets))
        segments = torch.cat((prefix_lengths, self._lengths))
        self.positions = self._to_device(_ranges(first_positions, segments)[None])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention; all tensors are (1, heads, tokens, head_dim).

        The keys and values of a prefix are copied to its branches, for this operation only. GPUs use the
        variable-length kernel if it supports the dtype and head size. Otherwise prefixes are a padded batch, and
        branches another, with a mask.
        """
        if has_kernel(query.device, query.dtype, query.shape[-1]):
            bounds, key_bounds, copies = self._bounds
            keys, values = (copies.make(tensor.squeeze(0).transpose(0, 1)) for tensor in (key, value))
            return bounds.attend(query, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], key_bounds)
        of_prefixes, of_branches = self._paddings
        by_token = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        if of_prefixes is None:
            q, k, v = (of_branches.pad(tokens) for tokens in by_token)
            output = of_branches.unpad(attend(q, k, v, is_causal=True))
            return output.transpose(0, 1).unsqueeze(0)
        num_shared = int(self._prefix_lengths.sum())
        parts = [torch.split(tokens, [num_shared, len(tokens) - num_shared]) for tokens in by_token]
        q, prefix_k, prefix_v = (of_prefixes.pad(tokens) for tokens, _ in parts)
        of_shared = attend(q, prefix_k, prefix_v, is_causal=True)
        q, k, v = (of_branches.pad(tokens) for _, tokens in parts)
        k, v = torch.cat((self._copy(prefix_k), k), dim=2), torch.cat((self._copy(prefix_v), v), dim=2)
        of_own = attend(q, k, v, mask=self._mask)
        output = torch.cat((of_prefixes.unpad(of_shared), of_branches.unpad(of_own)))
        return output.transpose(0, 1).unsqueeze(0)

    @cached_property
    def _bounds(self) -> tuple[DocumentBounds, DocumentBounds, "_Copies"]:
        """Bounds of the queries and of the keys of each prefix and branch, and the copies of tokens for the keys."""
        queries = torch.cat((self._prefix_lengths, self._lengths))
        keys = torch.cat((self._prefix_lengths, self._offsets + self._lengths))
        starts = queries.cumsum(0) - queries
        num_prefixes = len(self._prefix_lengths)
        parts = torch.stack((starts[self._prefixes], starts[num_prefixes:]), dim=1).flatten()
        lengths = torch.stack((self._offsets, self._lengths), dim=1).flatten()
        index = _ranges(torch.cat((starts[:num_prefixes], parts)), torch.cat((self._prefix_lengths, lengths)))
        of_queries, of_keys = (
            DocumentBounds(self._to_device(F.pad(counts.cumsum(0), (1, 0)).int()), int(counts.max()))
            for counts in (queries, keys)
        )
        return of_queries, of_keys, _Copies(index, int(self._prefix_lengths.sum()), self._device)

    @cached_property
    def _paddings(self) -> tuple["_Padding | None", "_Padding"]:
        """Padded layouts of the prefixes and of the branches; None for prefixes if all are empty."""
        has_prefixes = bool(self._prefix_lengths.any())
        of_prefixes = _Padding(self._prefix_lengths, self._device) if has_prefixes else None
        return of_prefixes, _Padding(self._lengths, self._device)

    @cached_property
    def _mask(self) -> Tensor:
        """Attention mask of the branches: (branches or 1, 1, queries, prefix + queries) bool, True where allowed."""
        num_queries = int(self._lengths.max())
        is_prefix = torch.arange(int(self._prefix_lengths.max())) < self._offsets[:, None]
        if bool(is_prefix.all()):
            is_prefix = is_prefix[:1]
        is_causal = torch.ones(num_queries, num_queries, dtype=torch.bool).tril()
        parts = (is_prefix[:, None].expand(-1, num_queries, -1), is_causal.expand(len(is_prefix), -1, -1))
        return self._to_device(torch.cat(parts, dim=2)[:, None])

    @cached_property
    def _prefix_of_branches(self) -> Tensor:
        return self._to_device(self._prefixes)

    def _copy(self, prefixes: Tensor) -> Tensor:
        """Copy (prefixes, heads, tokens, head_dim) to the branches."""
        if self._device.type == "cpu":
            return prefixes.index_select(0, self._prefix_of_branches)
        return prefixes[self._prefix_of_branches]  # unlike index_select, its backward pass on a GPU is deterministic

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenated ranges of consecutive integers with these starts and lengths, (sum of lengths,) int64."""
    shift = starts - (lengths.cumsum(0) - lengths)
    index = shift.repeat_interleave(lengths)
    return index + torch.arange(len(index))


class _Padding:
    """Conversion between concatenated sequences, (tokens, heads, head_dim), and a batch that is padded with zeros.

    Both directions and their gradients copy each token once.

    Args:
        lengths: (sequences,) int64 in host memory, tokens of each sequence.
        device: device of the tensors.

    Attributes:
        width: tokens of the longest sequence.
    """

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        self.width = int(lengths.max())
        columns = torch.arange(self.width)
        is_token = (columns < lengths[:, None]).flatten()
        padded = (lengths.cumsum(0) - lengths)[:, None] + columns
        index = padded.clamp(max=int(lengths.sum()) - 1).flatten()
        places = is_token.nonzero()[:, 0]
        self._index, self._places = (tensor.to(device, non_blocking=True) for tensor in (index, places))
        self._is_padding = None if bool(is_token.all()) else (~is_token)[:, None, None].to(device, non_blocking=True)

    def pad(self, tokens: Tensor) -> Tensor:
        """Convert (tokens, heads, head_dim) to (sequences, heads, width, head_dim)."""
        padded = _apply(tokens, self.select_padded, self.select_tokens)
        return padded.view(-1, self.width, *padded.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """Convert (sequences, heads, width, head_dim) to (tokens, heads, head_dim)."""
        return _apply(padded.transpose(1, 2).flatten(0, 1), self.select_tokens, self.select_padded)

    def select_padded(self, tokens: Tensor) -> Tensor:
        """Copy (tokens, heads, head_dim) to (sequences * width, heads, head_dim), with zeros as padding."""
        selected = tokens.index_select(0, self._index)
        return selected if self._is_padding is None else selected.masked_fill_(self._is_padding, 0.0)

    def select_tokens(self, padded: Tensor) -> Tensor:
        """Copy (sequences * width, heads, head_dim) to (tokens, heads, head_dim), without the padding."""
        return padded.index_select(0, self._places)


class _Copies:
    """Copies of tokens whose gradients are added in a fixed order. The backward pass of torch would sort them first.

    Args:
        index: (copies,) int64 in host memory, token of each copy; each token has a copy.
        num_shared: number of tokens that may have several copies; they come first.
        device: device of the tokens.
    """

    def __init__(self, index: Tensor, num_shared: int, device: torch.device) -> None:
        order, counts = index.argsort(stable=True), index.bincount()
        starts, columns = counts.cumsum(0) - counts, torch.arange(1, int(counts.max()))
        others = order[(starts[:num_shared, None] + columns).clamp(max=len(order) - 1)]
        is_missing = (columns >= counts[:num_shared, None])[..., None, None]
        self._index, self._firsts, self._others, self._is_missing = (
            tensor.to(device, non_blocking=True) for tensor in (index, order[starts], others, is_missing)
        )

    def make(self, tokens: Tensor) -> Tensor:
        """Copy (tokens, heads, head_dim) to (copies, heads, head_dim)."""
        return _apply(tokens, self.select, self.add)

    def select(self, tokens: Tensor) -> Tensor:
        """Return the result of `make`, without a gradient."""
        return tokens.index_select(0, self._index)

    def add(self, copies: Tensor) -> Tensor:
        """Return the sum over the copies of each token, (tokens, heads, head_dim)."""
        total = copies.index_select(0, self._firsts)
        others = copies.index_select(0, self._others.flatten()).view(*self._others.shape, *copies.shape[1:])
        total[: len(others)] += others.masked_fill_(self._is_missing, 0.0).sum(1)
        return total


class _Linear(torch.autograd.Function):
    """A linear function with its adjoint as gradient. The gradients of torch's indexing would be added row by row."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, function: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.adjoint = adjoint
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradients[0]), None, None


def _apply(tensor: Tensor, function: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Linear.apply(tensor, function, adjoint)  # type: ignore[no-untyped-call]
    return result


def takes_branches(model: nn.Module) -> bool:
    """Return whether forward() of a model, wrapped or not, has the argument `branches`."""
    kind: Any = type(model.module if isinstance(model, DistributedDataParallel) else model)
    return _takes_branches(kind)


@cache
def _takes_branches(kind: Any) -> bool:
    return "branches" in inspect.signature(kind.forward).parameters
