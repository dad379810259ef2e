"""L2 norms of gradients, weights and updates per block, computed on the device in selected steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from foundry.config.metrics import NORMS
from foundry.parallel.grad_norm import local_shard


@dataclass(frozen=True)
class NormsByBlock:
    """Norms measured in one step; they stay on the device until `read` is called.

    Attributes:
        blocks: names of the blocks.
        values: (3, blocks) float32, one row for each entry of `NORMS`, equal on all ranks.
    """

    blocks: Sequence[str]
    values: Tensor

    def read(self) -> dict[str, float]:
        """Return the norms by name, such as `grad_norm/model.layers.0`. Synchronizes with the device."""
        rows = zip(NORMS, self.values.tolist(), strict=True)
        return {f"{norm}/{block}": value for norm, row in rows for block, value in zip(self.blocks, row, strict=True)}


@dataclass(frozen=True)
class _Layout:
    """Parameters on the same device that are sharded over the same process groups.

    Attributes:
        groups: process groups whose ranks hold different shards of the parameters.
        parameters: parameters as passed to the optimizer.
        blocks: (parameters,) int64, block index of each parameter, on the parameters' device.
    """

    groups: tuple[ProcessGroup, ...]
    parameters: Sequence[Tensor]
    blocks: Tensor

    def square_sums(self, tensors: list[Tensor], num_blocks: int) -> Tensor:
        """Return the sum of squares of this rank's shards by block, (num_blocks,) float32; one tensor per parameter."""
        squares = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square()
        return squares.new_zeros(num_blocks).index_add_(0, self.blocks, squares)

    def reduce(self, sums: Tensor, device: torch.device) -> Tensor:
        """Add up `sums` over the ranks that hold different shards, and move them to `device`."""
        for group in self.groups:
            dist.all_reduce(sums, group=group)
        return sums.to(device)


@dataclass(frozen=True)
class Snapshot:
    """State before an update, per layout: sums of squared gradients and copies of the weights."""

    gradients: Sequence[Tensor]
    weights: Sequence[list[Tensor]]


class BlockNorms:
    """Measures each block's L2 norm of the gradient before clipping, of the weights, and of the update.

    It never synchronizes with the device. In a measured step it holds a copy of this rank's part of the trainable
    weights during the update, when activations are already freed, and does one small all-reduce per process group that
    shards parameters; other steps cost nothing.

    Args:
        blocks: trainable parameters by block name, as passed to the optimizers: plain tensors, which are equal on all
            ranks, or DTensors, whose shards count once each, regardless of the mesh.
        every_n_steps: optimizer steps between measurements; the first step is measured too.
        device: device on which the norms are kept.
    """

    def __init__(self, blocks: Mapping[str, Sequence[Tensor]], *, every_n_steps: int, device: torch.device) -> None:
        self._names, self._every, self._device = tuple(blocks), every_n_steps, device
        layouts = dict[tuple[torch.device, tuple[ProcessGroup, ...]], list[tuple[Tensor, int]]]()
        with torch.no_grad():
            for number, parameters in enumerate(blocks.values()):
                for parameter in parameters:
                    groups, local = local_shard(parameter)
                    layouts.setdefault((local.device, groups), []).append((parameter, number))
        self._layouts = [
            _Layout(
                groups, [parameter for parameter, _ in members], torch.tensor([n for _, n in members], device=place)
            )
            for (place, groups), members in layouts.items()
        ]

    def is_due(self, step: int) -> bool:
        """Return True if step `step`, counted from 1, is measured."""
        return step == 1 or step % self._every == 0

    @torch.no_grad()
    def before_update(self) -> Snapshot:
        """Return sums of squared gradients and copies of the weights, to be taken before clipping and the update."""
        gradients, weights = list[Tensor](), list[list[Tensor]]()
        for layout in self._layouts:
            zero = torch.zeros((), device=layout.blocks.device)
            grads = [
                zero if parameter.grad is None else local_shard(parameter.grad)[1] for parameter in layout.parameters
            ]
            gradients.append(layout.square_sums(grads, len(self._names)))
            weights.append([local_shard(parameter)[1].clone() for parameter in layout.parameters])
        return Snapshot(gradients, weights)

    @torch.no_grad()
    def after_update(self, snapshot: Snapshot) -> NormsByBlock:
        """Return the norms; the update is the change of the weights since `snapshot`, with norm 0 if it was skipped."""
        total = torch.zeros(len(NORMS), len(self._names), device=self._device)
        for layout, gradients, previous in zip(self._layouts, snapshot.gradients, snapshot.weights, strict=True):
            weights = layout.square_sums(previous, len(self._names))
            torch._foreach_sub_(previous, [local_shard(parameter)[1] for parameter in layout.parameters])
            updates = layout.square_sums(previous, len(self._names))
            total += layout.reduce(torch.stack([gradients, weights, updates]), self._device)
        return NormsByBlock(self._names, total.sqrt())


def group_by_block(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, list[Tensor]]:
    """Group the trainable parameters of a model by block, in the model's order.

    A parameter outside all blocks is grouped under the outermost module that contains no block, such as
    `model.embed_tokens` or `lm_head`.

    Args:
        model: model whose parameter names are used.
        blocks: blocks of the model, for example from `find_blocks`; if blocks are nested, the innermost one counts.
    """
    block_ids = {id(block) for block in blocks}
    names = {name for name, module in model.named_modules() if id(module) in block_ids}
    above = {name[:end] for name in names for end in range(len(name)) if name[end] == "."}
    groups = dict[str, list[Tensor]]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(_block_of(name, names, above), []).append(parameter)
    return groups


def _block_of(parameter: str, blocks: set[str], above: set[str]) -> str:
    prefixes = [parameter[:end] for end, letter in enumerate(parameter) if letter == "."] + [parameter]
    enclosing = [prefix for prefix in prefixes if prefix in blocks]
    return enclosing[-1] if enclosing else next(prefix for prefix in prefixes if prefix not in above)
