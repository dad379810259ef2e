"""Parameters and gradients on each rank, after the sharding of `foundry.parallel.wrap`."""

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
        parameters: parameters of the unit's module that belong to no unit inside of it.
        gather_dtype: type of gathered weights and of newly computed gradients; None for the parameter's type.
        reduce_dtype: type of the gradients' reduction; None to reduce them as computed.
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
    """Parameters of a model as held by one rank.

    Attributes:
        units: FSDP2 units, the root last; empty if nothing is sharded.
        replicated: parameters that every rank holds whole.
        num_shards: number of ranks that share a unit.
        keeps_gathered: whether units stay gathered from the forward to the backward pass.
        prefetches: whether a unit is gathered while the previous one computes.
        offloads: whether shards are in host memory.
        reduces_replicated: whether the gradients of `replicated` are copied into one tensor and averaged at the end of
            a window.
        keeps_gradients: whether gradients stay allocated during the whole run, as in DDP's buckets.
    """

    units: list[_Unit]
    replicated: list[nn.Parameter]
    num_shards: int = 1
    keeps_gathered: bool = False
    prefetches: bool = False
    offloads: bool = False
    reduces_replicated: bool = False
    keeps_gradients: bool = False

    def parts(self, bytes_of: Callable[[nn.Parameter], int]) -> tuple[int, int]:
        """Return the bytes of this rank's shards and of `replicated`; `bytes_of` counts an unsharded parameter."""
        shards = sum(bytes_of(p) * self._rows(p) // max(1, p.shape[0]) for unit in self.units for p in unit.parameters)
        return shards, sum(map(bytes_of, self.replicated))

    def gathered(self, sync: GradientSync, *, ahead: bool = True) -> int:
        """Return the peak bytes of gathered weights: the root and the blocks in flight, or all units if they are kept.

        Args:
            sync: when gradients are reduced.
            ahead: whether to count the block that is prefetched while another computes.
        """
        if not self.units:
            return 0
        *blocks, root = [unit.gathered() for unit in self.units]
        if self.keeps_gathered or sync is GradientSync.last_keep_params:
            return sum(blocks) + root
        pairs = [sum(pair) for pair in pairwise(blocks)] if self.prefetches and ahead else []
        return root + max([*pairs, *blocks], default=0)

    def ungathered(self, sync: GradientSync) -> int:
        """Return the bytes of gathering all units at once, beyond the bytes gathered in a step."""
        return sum(unit.gathered() for unit in self.units) - self.gathered(sync)

    def gradients(self, sync: GradientSync, accumulates: bool) -> int:
        """Return the peak bytes of gradients, before the window's last reduction if whole gradients are accumulated."""
        shards, replicated = self.parts(grad_bytes)
        if not accumulates or sync is GradientSync.every:
            return shards + replicated
        # Offloaded shards of gradients are allocated in addition to whole gradients; shards on the device replace them.
        return replicated + sum(unit.reduced() for unit in self.units) + (shards if self.offloads else 0)

    def reducing_units(self, sync: GradientSync, accumulates: bool, *, root: bool = True) -> int:
        """Return the peak bytes of one unit's gradients in its reduction.

        Gradients count in the reduction's type and, unless whole gradients are accumulated, again as they were
        computed. Accumulated shards of gradients are allocated in addition to the shard of the reduction.

        Args:
            sync: when gradients are reduced.
            accumulates: whether a window has several microbatches.
            root: whether to count the root too, which is reduced last.
        """
        units = self.units if root else self.units[:-1] or self.units

        def others(unit: _Unit) -> int:
            if not accumulates:
                return unit.computed()
            return unit.computed() + unit.reduced() // self.num_shards if sync is GradientSync.every else 0

        return max((unit.reduced() + others(unit) for unit in units), default=0)

    def averaging(self) -> int:
        """Return the bytes of the copy of `replicated`'s gradients that is averaged over the ranks; 0 without one."""
        return sum(map(grad_bytes, self.replicated)) if self.reduces_replicated else 0

    def reducing(self, sync: GradientSync, accumulates: bool) -> int:
        """Return the peak bytes of gradients in a reduction: of one unit, or of `replicated`."""
        return max(self.reducing_units(sync, accumulates), self.averaging())

    def largest_unit(self) -> int:
        """Return the bytes of the largest unit in its parameters' types: a unit is allocated whole, then sharded."""
        return max((sum(map(num_bytes, unit.parameters)) for unit in self.units), default=0)

    def _rows(self, parameter: nn.Parameter) -> int:
        return -(-parameter.shape[0] // self.num_shards)


def build_layout(config: Distributed, model: nn.Module, policy: PrecisionPolicy, world_size: int) -> Layout:
    """Return the layout that `foundry.parallel.wrap` gives a model (with tensor parallelism, a rank's part of it)."""
    resolved = resolve_distributed(config, world_size)
    if isinstance(resolved, Single):
        return Layout([], list(model.parameters()))
    num_shards = resolved.mesh_shape(world_size).get("shard", 1)
    if isinstance(resolved, DDP):
        if not resolved.shard_optimizer:
            overlaps = resolved.overlap_grad_reduce
            return Layout([], list(model.parameters()), reduces_replicated=not overlaps, keeps_gradients=overlaps)
        units, replicated = _units(model, policy, blocks=resolved.overlap_grad_reduce)
        return Layout(units, replicated, num_shards, keeps_gathered=True, reduces_replicated=True)
    units, replicated = _units(model, policy, blocks=True)
    return Layout(
        units,
        replicated,
        num_shards,
        keeps_gathered=not resolved.reshard_after_forward,
        prefetches=resolved.overlap_param_gather,
        offloads=resolved.cpu_offload,
        reduces_replicated=True,
    )


def _units(model: nn.Module, policy: PrecisionPolicy, *, blocks: bool) -> tuple[list[_Unit], list[nn.Parameter]]:
    """Return FSDP2's units, the root last, and the parameters that FSDP2 does not shard."""
    modules = list(find_blocks(model)) if blocks else []
    in_blocks = {parameter for module in modules for parameter in module.parameters()}
    replicated = [p for p in model.parameters() if policy.is_replicated(p, in_block=p in in_blocks)]
    assigned, units = set(replicated), list[_Unit]()
    for module in (*modules, model):
        types = policy.fsdp_policy(root=module is model)
        units.append(
            _Unit([p for p in module.parameters() if p not in assigned], types.param_dtype, types.reduce_dtype)
        )
        assigned.update(module.parameters())
    return units, replicated


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of an unsharded tensor."""
    return tensor.numel() * tensor.element_size()


def grad_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of a parameter's gradient; 0 if it is frozen."""
    return num_bytes(parameter) if parameter.requires_grad else 0
