"""What each rank holds of a model's parameters and gradients, as `foundry.parallel.wrap` divides them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from foundry.config.schemas.distributed import DDP, Distributed, GradientSync, Single, resolve_distributed
from foundry.models.fsdp_block import find_blocks
from foundry.parallel.precision import PrecisionPolicy


@dataclass(frozen=True)
class _Unit:
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        parameters: those that no inner unit has.
        gather_dtype: of whole weights, and of gradients as they are computed; None: the parameter's own.
        reduce_dtype: of gradients where they are summed; None: as they are computed.
    """

    parameters: list[nn.Parameter]
    gather_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    def gathered(self) -> int:
        return sum(p.numel() * (self.gather_dtype or p.dtype).itemsize for p in self.parameters)

    def computed(self) -> int:
        return sum(p.numel() * (self.gather_dtype or p.dtype).itemsize for p in self.parameters if p.requires_grad)

    def reduced(self) -> int:
        dtype = self.reduce_dtype or self.gather_dtype
        return sum(p.numel() * (dtype or p.dtype).itemsize for p in self.parameters if p.requires_grad)


@dataclass(frozen=True)
class Layout:
    """What a rank holds.

    Attributes:
        units: FSDP2's, the root last; empty where nothing is sharded.
        whole: parameters that every rank holds whole.
        num_shards: ranks among which a unit is divided.
        keeps_gathered: units stay gathered from forward to backward.
        prefetches: units are gathered while the one before computes.
        offloads: shards live in host memory.
        reduces_whole: gradients of `whole` are copied into one tensor and averaged at the end.
        keeps_gradients: gradients have memory through the whole run: DDP's buckets.
    """

    units: list[_Unit]
    whole: list[nn.Parameter]
    num_shards: int = 1
    keeps_gathered: bool = False
    prefetches: bool = False
    offloads: bool = False
    reduces_whole: bool = False
    keeps_gradients: bool = False

    def parts(self, bytes_of: Callable[[nn.Parameter], int]) -> tuple[int, int]:
        """Bytes of this rank's shards, and of what it holds whole, given those of whole parameters."""
        shards = sum(bytes_of(p) * self._rows(p) // max(1, p.shape[0]) for unit in self.units for p in unit.parameters)
        return shards, sum(map(bytes_of, self.whole))

    def gathered(self, sync: GradientSync, *, ahead: bool = True) -> int:
        """Return the bytes of whole weights at once: the root and the blocks in flight, or all units if they are kept.

        Args:
            sync: when gradients are reduced.
            ahead: count the block that is gathered while another computes.
        """
        if not self.units:
            return 0
        *blocks, root = [unit.gathered() for unit in self.units]
        if self.keeps_gathered or sync is GradientSync.last_keep_params:
            return sum(blocks) + root
        pairs = [sum(pair) for pair in pairwise(blocks)] if self.prefetches and ahead else []
        return root + max([*pairs, *blocks], default=0)

    def ungathered(self, sync: GradientSync) -> int:
        """What all whole weights at once take beyond those that are gathered in a step."""
        return sum(unit.gathered() for unit in self.units) - self.gathered(sync)

    def gradients(self, sync: GradientSync, accumulates: bool) -> int:
        """Gradients at their peak, before the window's last reduction where they are summed up whole."""
        shards, whole = self.parts(grad_bytes)
        if not accumulates or sync is GradientSync.every:
            return shards + whole
        # Offloaded shards come into being next to the whole gradients; others take their place.
        return whole + sum(unit.reduced() for unit in self.units) + (shards if self.offloads else 0)

    def reducing_units(self, sync: GradientSync, accumulates: bool, *, root: bool = True) -> int:
        """Return the bytes of a unit's gradients in the reduction's type, and of those just computed unless summed.

        Args:
            sync: when gradients are reduced.
            accumulates: whether a window has several microbatches.
            root: count the root too, which is reduced last.
        """
        summed = accumulates and sync is not GradientSync.every
        units = self.units if root else self.units[:-1] or self.units
        return max((unit.reduced() + (0 if summed else unit.computed()) for unit in units), default=0)

    def averaging(self) -> int:
        """The copy of the gradients of `whole` that is averaged over the ranks."""
        return sum(map(grad_bytes, self.whole)) if self.reduces_whole else 0

    def reducing(self, sync: GradientSync, accumulates: bool) -> int:
        """Gradients on their way through a reduction, at most."""
        return max(self.reducing_units(sync, accumulates), self.averaging())

    def largest_unit(self) -> int:
        """The largest unit, whole and in the parameters' own type, which has memory before it is sharded."""
        return max((sum(map(num_bytes, unit.parameters)) for unit in self.units), default=0)

    def _rows(self, parameter: nn.Parameter) -> int:
        return -(-parameter.shape[0] // self.num_shards)


def build_layout(config: Distributed, model: nn.Module, policy: PrecisionPolicy, world_size: int) -> Layout:
    """What `foundry.parallel.wrap` makes of a model; of one that is divided, what it makes of a rank's part."""
    resolved = resolve_distributed(config, world_size)
    if isinstance(resolved, Single):
        return Layout([], list(model.parameters()))
    num_shards = resolved.mesh_shape(world_size).get("shard", 1)
    if isinstance(resolved, DDP):
        if not resolved.shard_optimizer:
            overlaps = resolved.overlap_grad_reduce
            return Layout([], list(model.parameters()), reduces_whole=not overlaps, keeps_gradients=overlaps)
        units, whole = _units(model, policy, blocks=resolved.overlap_grad_reduce)
        return Layout(units, whole, num_shards, keeps_gathered=True, reduces_whole=True)
    units, whole = _units(model, policy, blocks=True)
    return Layout(
        units,
        whole,
        num_shards,
        keeps_gathered=not resolved.reshard_after_forward,
        prefetches=resolved.overlap_param_gather,
        offloads=resolved.cpu_offload,
        reduces_whole=True,
    )


def _units(model: nn.Module, policy: PrecisionPolicy, *, blocks: bool) -> tuple[list[_Unit], list[nn.Parameter]]:
    """FSDP2's units, the root last, and the parameters it leaves whole."""
    modules = list(find_blocks(model)) if blocks else []
    in_blocks = {parameter for module in modules for parameter in module.parameters()}
    whole = [p for p in model.parameters() if policy.is_replicated(p, in_block=p in in_blocks)]
    taken, units = set(whole), list[_Unit]()
    for module in (*modules, model):
        types = policy.fsdp_policy(root=module is model)
        units.append(_Unit([p for p in module.parameters() if p not in taken], types.param_dtype, types.reduce_dtype))
        taken.update(module.parameters())
    return units, whole


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a whole tensor."""
    return tensor.numel() * tensor.element_size()


def grad_bytes(parameter: nn.Parameter) -> int:
    """Bytes of its gradient: none where it is frozen."""
    return num_bytes(parameter) if parameter.requires_grad else 0
