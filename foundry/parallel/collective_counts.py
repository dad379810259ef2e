"""Expected number of collectives of an optimizer step, computed from the strategy.

`gradient_sync.py` has a table of the collectives of each policy.
"""

from collections import Counter

from foundry.config.schemas.distributed import DDP, FSDP, HSDP, GradientSync, Resolved, Single


def step_collectives(
    distributed: Resolved,
    *,
    num_blocks: int,
    num_microbatches: int,
    num_owner_batches: int = 0,
    normalizes_rows: bool = False,
    has_replicated: bool = True,
) -> Counter[str]:
    """Return the number of collectives between devices in one optimizer step, by kind, except for bucketed DDP.

    A unit is a sharded module: each block, and the root with all parameters outside blocks. In addition to the
    wrapper's collectives, a step has

    - one all-reduce of the number of valid items, and one of the sums of loss and metrics;
    - one all-reduce of the squares of sharded gradients, for their norm, per mesh dimension that shards them;
    - one all-reduce of the gradients of parameters that FSDP2 leaves replicated;
    - two all-to-alls for each batch of matrices that Muon gathers, and two more if it normalizes rows.

    Args:
        distributed: the resolved strategy.
        num_blocks: number of blocks of the model.
        num_microbatches: forward passes of the step.
        num_owner_batches: batches of matrices that an optimizer gathers; 0 for optimizers that need no whole matrices.
        normalizes_rows: whether the optimizer also gathers a value for each row of these matrices.
        has_replicated: whether FSDP2 leaves parameters replicated, as it does with norms and biases in blocks with amp.
    """
    if isinstance(distributed, Single):
        return Counter()
    counts = Counter(all_reduce=2, all_to_all=(4 if normalizes_rows else 2) * num_owner_batches)
    if isinstance(distributed, DDP) and not distributed.shard_optimizer:
        assert not distributed.overlap_grad_reduce, "buckets depend on the sizes of tensors"
        counts["all_reduce"] += num_microbatches if distributed.gradient_sync is GradientSync.every else 1
        return +counts
    is_one_unit = isinstance(distributed, DDP) and not distributed.overlap_grad_reduce
    counts["all_reduce"] += 1 + (has_replicated and not is_one_unit)
    counts += _unit_collectives(distributed, 0 if is_one_unit else num_blocks, num_microbatches)
    if distributed.tensor_parallel > 1:
        counts["all_reduce"] += _tensor_parallel_all_reduces(num_blocks, num_microbatches)
    return +counts


def _unit_collectives(distributed: FSDP | DDP, num_blocks: int, num_microbatches: int) -> Counter[str]:
    """Count all-gathers, reduce-scatters and, for HSDP, all-reduces of the units that FSDP2 shards.

    With `reshard_after_forward`, a block is gathered for the forward pass and again for the backward pass; without it a
    block, and always the root, is gathered once for both. Weights that are kept through the window are gathered once
    per window. Gradients are reduced after every microbatch, or after the last microbatch.
    """
    sync = distributed.gradient_sync
    keeps_params, units = isinstance(distributed, DDP) or sync is GradientSync.last_keep_params, num_blocks + 1
    again = num_blocks if isinstance(distributed, FSDP) and distributed.reshard_after_forward else 0
    gathers = units if keeps_params else num_microbatches * (units + again)
    reductions = units * (num_microbatches if sync is GradientSync.every else 1)
    counts = Counter(all_gather=gathers, reduce_scatter=reductions)
    if isinstance(distributed, HSDP):
        counts["all_reduce"] += reductions
    return counts


def _tensor_parallel_all_reduces(num_blocks: int, num_microbatches: int) -> int:
    """Count all-reduces of activations after attention and feed-forward layers, and of the layers' input gradients.

    Each microbatch adds one for the embedded tokens, one for the gradient of the last hidden states, and two for the
    maximum and the sums over the vocabulary, with a loss of a single tile. Each step adds two for the norm: gradients
    sharded by tensor parallelism are summed over a second mesh dimension.
    """
    return num_microbatches * (4 * num_blocks + 4) + 2
