"""Tensor parallelism: placement of parameters, and collectives of a block."""

import pytest
from support.harness import run_ranks
from support.toy import FP32

from foundry.config.schemas.distributed import FSDP

pytestmark = pytest.mark.distributed
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2}


def build(world, num_layers=2):
    import torch

    from foundry.models.transformer import Transformer
    from foundry.parallel.process_group import arrange

    torch.manual_seed(0)
    return Transformer(**SIZES, num_layers=num_layers, max_seq_len=8), arrange(world, FSDP(tensor_parallel=2))


def count(world, num_layers):
    """Return the number of all-reduces of a forward pass, and of forward and backward, of a model without FSDP."""
    from collections import Counter

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from foundry.models.token_loss import TokenLoss
    from foundry.parallel.tensor_parallel import divide

    counts = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace in ("c10d", "_c10d_functional"):
                counts[operator.overloadpacket.__name__.strip("_")] += 1
            return operator(*args, **(kwargs or {}))

    model, own = build(world, num_layers)
    divide(model, own.tp_mesh, FP32)
    tokens = torch.arange(16).view(2, 8)
    with Count():
        loss = model(tokens, tokens + 1, token_loss=TokenLoss()).loss
        forward = counts["allreduce"] + counts["all_reduce"]
        loss.backward()
    assert not any(word in name for name in counts for word in ("gather", "scatter", "to_all", "broadcast")), counts
    return forward, counts["allreduce"] + counts["all_reduce"]


def count_both(world):
    return count(world, 1), count(world, 3)


def test_tensor_parallel_block_has_two_all_reduces_each_way():
    (forward, both), (more_forward, more_both) = run_ranks(count_both, 2)[0]
    assert (more_forward - forward) / 2 == 2
    assert (more_both - both) / 2 == 4
    # One for the embedding; for the loss one for a maximum, one for two sums and one for the hidden states' gradient.
    assert forward - 2 == 4


def placed(world):
    """Return local shapes of the embedding, two projections and a norm under FSDP2 and tensor parallelism."""
    from foundry.parallel.wrap import parallelize

    model, own = build(world)
    parallel = parallelize(model, FP32, own, grad_checkpointing=False, torchcompile=False)
    named = dict(parallel.model.named_parameters())
    assert (own.dp_rank, own.dp_size, own.leads_share) == (world.rank // 2, 2, world.rank % 2 == 0)
    assert {parameter.device_mesh.mesh_dim_names for parameter in named.values()} == {("shard", "tensor")}
    layer = "model.layers.0."
    kinds = ("model.embed_tokens", f"{layer}self_attn.k_proj", f"{layer}self_attn.o_proj", f"{layer}input_layernorm")
    return [tuple(named[f"{kind}.weight"].to_local().shape) for kind in kinds]


def test_matrices_are_sharded_in_two_dimensions_and_norms_in_one():
    for shapes in run_ranks(placed, 4):
        assert shapes == [(8, 16), (2, 16), (8, 8), (8,)]


def refuse(world):
    import torch

    from foundry.core.errors import ConfigError
    from foundry.models.tensor_parallel import Split
    from foundry.parallel.tensor_parallel import divide

    model, own = build(world)
    model.lm_head.weight = model.model.embed_tokens.weight
    odd = torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False))
    odd.tensor_parallel_plan = lambda: {"0": Split.columns}
    biased = torch.nn.Sequential(torch.nn.Linear(4, 4))
    biased.tensor_parallel_plan = odd.tensor_parallel_plan
    messages = []
    for wrong in (model, odd, biased, torch.nn.Linear(4, 4)):
        try:
            divide(wrong, own.tp_mesh, FP32)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_model_unfit_for_tensor_parallelism_is_refused():
    tied, odd, biased, silent = run_ranks(refuse, 2)[0]
    key = "distributed.tensor_parallel: is 2 but "
    assert tied == f"{key}lm_head.weight and model.embed_tokens.weight share one parameter; set it to 1"
    assert odd == f"{key}must divide the 5 columns of 0"
    assert biased == f"{key}0 is neither an embedding nor a linear layer without bias; set it to 1"
    assert silent == f"{key}Linear has no tensor_parallel_plan(); set it to 1"
