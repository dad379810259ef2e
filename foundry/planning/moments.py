"""The moments of a run at which a device's memory may peak."""

from collections.abc import Mapping
from dataclasses import dataclass

from foundry.config.schemas.distributed import GradientSync
from foundry.planning.activations import Activations
from foundry.planning.layout import Layout, grad_bytes, num_bytes

MOMENTS = {
    "build": "while the model is built: shards, and one whole unit",
    "generation": "while completions are generated: whole weights, keys and values",
    "forward": "at the start of the backward pass: all activations",
    "backward": "at the end of the backward pass: all gradients, and the activations or the reduction of one unit",
    "reduction": "while gradients that are not sharded are averaged over the ranks",
    "optimizer": "in the optimizer step: gradients, and the optimizer's temporary tensors",
}
"""Moments in the order of a run, each with the largest parts of the memory then. Memory peaks at one of them."""


@dataclass(frozen=True)
class FrozenModels:
    """Frozen models that a step uses.

    Attributes:
        layouts: layout of each model, by name.
        buffers: bytes of all their buffers.
    """

    layouts: Mapping[str, Layout]
    buffers: int

    @property
    def shards(self) -> int:
        """Bytes of sharded weights."""
        return sum(layout.parts(num_bytes)[0] for layout in self.layouts.values())

    @property
    def total(self) -> int:
        """Bytes of weights and buffers."""
        return sum(sum(layout.parts(num_bytes)) for layout in self.layouts.values()) + self.buffers


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of a rank's memory in bytes; each pair counts the rank's shards and the replicated parameters.

    Attributes:
        layout: layout of the trained model.
        frozen: frozen models.
        sync: when gradients are reduced.
        accumulates: whether a window has several microbatches.
        offloads: whether shards are in host memory.
        weights: weights of the trained model.
        optimizer: state of the optimizers; 0 if unknown.
        ema: averaged weights.
        buffers: buffers of the trained model.
        activations: activations of one microbatch; None if unknown.
        generation: bytes that only the generation of completions needs.
        temporary: bytes that the optimizers allocate and free in a step.
    """

    layout: Layout
    frozen: FrozenModels
    sync: GradientSync
    accumulates: bool
    offloads: bool
    weights: tuple[int, int]
    optimizer: tuple[int, int]
    ema: tuple[int, int]
    buffers: int
    activations: Activations | None
    generation: int
    temporary: int

    @property
    def host_weights(self) -> int:
        """Bytes of weights in host memory."""
        return self.weights[0] + self.frozen.shards if self.offloads else 0

    @property
    def host_states(self) -> int:
        """Bytes of optimizer state and averaged weights in host memory."""
        return self.optimizer[0] + self.ema[0] if self.offloads else 0

    def gathered(self, *, ahead: bool = True) -> int:
        """Return the bytes of gathered weights of all models; `ahead` as for `Layout.gathered`."""
        return sum(layout.gathered(self.sync, ahead=ahead) for layout in self._layouts)

    def largest_unit(self) -> int:
        """Return the bytes of the largest unit of all models, which is allocated whole before it is sharded."""
        return max(layout.largest_unit() for layout in self._layouts)

    @property
    def _layouts(self) -> tuple[Layout, ...]:
        return self.layout, *self.frozen.layouts.values()


def count_moments(parts: Parts) -> dict[str, int]:
    """Return the bytes on the device at each of `MOMENTS`, for a step after the first, when optimizer state exists."""
    layout, sync, accumulates = parts.layout, parts.sync, parts.accumulates
    activations = parts.activations or Activations(0, 0, 0, 0, 0, False)
    weights = sum(parts.weights) + parts.frozen.total + parts.buffers - parts.host_weights
    states = weights + sum(parts.optimizer) + sum(parts.ema) - parts.host_states  # between two steps
    gathered = parts.gathered()
    shards, replicated = layout.parts(grad_bytes)
    in_host = shards if parts.offloads else 0
    gradients = layout.gradients(sync, accumulates) - in_host
    permanent = replicated if layout.keeps_gradients else 0
    earlier_gradients = gradients if accumulates else permanent
    in_window = activations.rounded if accumulates and sync is GradientSync.every else 0
    reduced_gradients = shards + replicated - in_host
    reducing = layout.reducing_units(sync, accumulates)
    in_loss = parts.gathered(ahead=False) + activations.forward_peak
    first_backward = gathered + activations.saved + activations.backward
    # While the last block's gradients are reduced, the inputs of all blocks are alive and, with checkpointing, one
    # recomputed block.
    reducing_block = layout.reducing_units(sync, accumulates, root=False)
    first_reduction = first_backward + reducing_block - (0 if activations.recomputes else activations.block)
    last_block = gathered + activations.rounded + activations.block + activations.backward + reducing_block
    # FSDP2 frees a unit's gathered weights before it reduces their gradients, and the root is the last unit.
    keeps_root = layout.keeps_gathered or sync is GradientSync.last_keep_params
    root = (gathered if keeps_root else 0) + activations.rounded + reducing
    moments = {
        "build": weights + parts.largest_unit(),
        "generation": states + permanent + gathered + parts.generation if parts.generation else 0,
        "forward": states + earlier_gradients + max(in_loss, first_backward, first_reduction),
        "backward": states + gradients + max(last_block, root),
        "reduction": states + reduced_gradients + in_window + layout.averaging() if layout.averaging() else 0,
        "optimizer": states + reduced_gradients + parts.temporary,
    }
    return {name: size for name, size in moments.items() if size > 0}
