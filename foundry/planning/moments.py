"""The moments of a run at which a device's memory may peak."""

from foundry.config.schemas.distributed import GradientSync
from foundry.planning.activations import Activations
from foundry.planning.layout import Layout, grad_bytes

MOMENTS = {
    "build": "while the model is built: shards, and one whole unit",
    "generation": "while completions are generated: whole weights, keys and values",
    "forward": "at the start of the backward pass: all activations",
    "backward": "at the end of the backward pass: all gradients, and the activations or the reduction of one unit",
    "reduction": "while gradients that are not sharded are averaged over the ranks",
    "optimizer": "in the optimizer step: gradients, and the optimizer's temporary tensors",
}
"""Moments in the order of a run, each with the largest parts of the memory then. Memory peaks at one of them."""


def count_moments(
    layout: Layout,
    sync: GradientSync,
    *,
    accumulates: bool,
    offloads: bool,
    built_weights: int,
    states: int,
    gathered: int,
    gathered_in_loss: int,
    activations: Activations,
    generation: int,
    temporary: int,
) -> dict[str, int]:
    """Return the bytes on the device at each of `MOMENTS`, for a step after the first, when optimizer state exists.

    Args:
        layout: layout of the trained model.
        sync: when gradients are reduced.
        accumulates: whether a window has several microbatches.
        offloads: whether shards of gradients are in host memory.
        built_weights: bytes of the weights of all models on the device, plus the bytes of the largest unit before
            sharding.
        states: bytes on the device between two steps.
        gathered: bytes of gathered weights of the FSDP2 units in flight.
        gathered_in_loss: bytes of gathered weights after the last block's forward pass, when no unit is prefetched.
        activations: activations of one microbatch.
        generation: bytes of all gathered weights beyond `gathered`, and of keys and values; 0 if nothing is generated.
        temporary: bytes that the optimizers allocate and free in a step.
    """
    shards, replicated = layout.parts(grad_bytes)
    in_host = shards if offloads else 0
    gradients = layout.gradients(sync, accumulates) - in_host
    permanent = replicated if layout.keeps_gradients else 0
    earlier_gradients = gradients if accumulates else permanent
    in_window = activations.rounded if accumulates and sync is GradientSync.every else 0
    reduced_gradients = shards + replicated - in_host
    reducing = layout.reducing_units(sync, accumulates)
    in_loss = gathered_in_loss + activations.forward_peak
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
        "build": built_weights,
        "generation": states + permanent + gathered + generation if generation else 0,
        "forward": states + earlier_gradients + max(in_loss, first_backward, first_reduction),
        "backward": states + gradients + max(last_block, root),
        "reduction": states + reduced_gradients + in_window + layout.averaging() if layout.averaging() else 0,
        "optimizer": states + reduced_gradients + temporary,
    }
    return {name: size for name, size in moments.items() if size > 0}
