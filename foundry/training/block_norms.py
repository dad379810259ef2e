"""Norms of gradients, weights and updates by block, on the device, in chosen steps."""

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
    """What was measured in a step; it stays on the device until it is read.

    Attributes:
        blocks: their names.
        values: (3, blocks) float32, a row for each of `NORMS`, equal on all ranks.
    """

    blocks: Sequence[str]
    values: Tensor

    def read(self) -> dict[str, float]:
        """By name, such as `grad_norm/model.layers.0`. Waits for the device."""
        rows = zip(NORMS, self.values.tolist(), strict=True)
        return {f"{norm}/{block}": value for norm, row in rows for block, value in zip(self.blocks, row, strict=True)}


@dataclass(frozen=True)
class _Layout:
    """Parameters that lie alike: on one device, and divided over the same process groups.

    Attributes:
        groups: those over which squares are summed.
        parameters: as the optimizer has them.
        blocks: (parameters,) int64, the number of the block of each, on their device.
    """

    groups: tuple[ProcessGroup, ...]
    parameters: Sequence[Tensor]
    blocks: Tensor

    def square_sums(self, tensors: list[Tensor], num_blocks: int) -> Tensor:
        """(num_blocks,) float32 of one tensor for each parameter, this rank's parts of them."""
        squares = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square()
        return squares.new_zeros(num_blocks).index_add_(0, self.blocks, squares)

    def reduced(self, sums: Tensor, device: torch.device) -> Tensor:
        """The same over all ranks that have a part, on a device; each part counts once, a whole tensor once."""
        for group in self.groups:
            dist.all_reduce(sums, group=group)
        return sums.to(device)


@dataclass(frozen=True)
class Before:
    """What is known before an update, by layout: sums of squared gradients, and copies of the weights."""

    gradients: Sequence[Tensor]
    weights: Sequence[list[Tensor]]


class BlockNorms:
    """Measures the L2 norm of each block's gradient before clipping, of its weights, and of what an update changes.

    No device is read. A measured step holds a copy of this rank's part of the trainable weights through the update,
    when activations are freed already, and makes one small reduction; a step between costs nothing.

    Args:
        blocks: the trainable parameters by the name of their block, as the optimizers have them: plain, the same on all
            ranks, or DTensors, of which each shard counts once whatever divides it.
        every_n_steps: optimizer steps between measured ones; the first is measured, too.
        device: where the norms are kept.
    """

    def __init__(self, blocks: Mapping[str, Sequence[Tensor]], *, every_n_steps: int, device: torch.device) -> None:
        self._names, self._every, self._device = tuple(blocks), every_n_steps, device
        found = dict[tuple[torch.device, tuple[ProcessGroup, ...]], list[tuple[Tensor, int]]]()
        with torch.no_grad():
            for number, parameters in enumerate(blocks.values()):
                for parameter in parameters:
                    groups, local = local_shard(parameter)
                    found.setdefault((local.device, groups), []).append((parameter, number))
        self._layouts = [
            _Layout(groups, [one for one, _ in members], torch.tensor([n for _, n in members], device=place))
            for (place, groups), members in found.items()
        ]

    def is_due(self, step: int) -> bool:
        """Whether a step, counted from one, is measured."""
        return step == 1 or step % self._every == 0

    @torch.no_grad()
    def before_update(self) -> Before:
        """Take the gradients as they are, and keep the weights."""
        gradients, weights = list[Tensor](), list[list[Tensor]]()
        for layout in self._layouts:
            zero = torch.zeros((), device=layout.blocks.device)
            grads = [zero if one.grad is None else local_shard(one.grad)[1] for one in layout.parameters]
            gradients.append(layout.square_sums(grads, len(self._names)))
            weights.append([local_shard(parameter)[1].clone() for parameter in layout.parameters])
        return Before(gradients, weights)

    @torch.no_grad()
    def after_update(self, before: Before) -> NormsByBlock:
        """The norms, of what changed since; an update that was left out has 0."""
        total = torch.zeros(len(NORMS), len(self._names), device=self._device)
        for layout, gradients, old in zip(self._layouts, before.gradients, before.weights, strict=True):
            weights = layout.square_sums(old, len(self._names))
            torch._foreach_sub_(old, [local_shard(parameter)[1] for parameter in layout.parameters])
            updates = layout.square_sums(old, len(self._names))
            total += layout.reduced(torch.stack([gradients, weights, updates]), self._device)
        return NormsByBlock(self._names, total.sqrt())


def group_by_block(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, list[Tensor]]:
    """The trainable parameters of a model, under the names of its blocks, in its own order.

    What is in no block goes by the outermost module that holds no block: `model.embed_tokens`, `lm_head`.

    Args:
        model: as its parameters are named.
        blocks: of it, such as `find_blocks` gives; of nested ones the innermost counts.
    """
    wanted = {id(block) for block in blocks}
    names = {name for name, module in model.named_modules() if id(module) in wanted}
    above = {name[:end] for name in names for end in range(len(name)) if name[end] == "."}
    grouped = dict[str, list[Tensor]]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grouped.setdefault(_block_of(name, names, above), []).append(parameter)
    return grouped


def _block_of(parameter: str, blocks: set[str], above: set[str]) -> str:
    prefixes = [parameter[:end] for end, letter in enumerate(parameter) if letter == "."] + [parameter]
    inside = [prefix for prefix in prefixes if prefix in blocks]
    return inside[-1] if inside else next(prefix for prefix in prefixes if prefix not in above)
