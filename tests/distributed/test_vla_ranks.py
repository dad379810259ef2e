"""A language-conditioned policy has the same losses, gradients and actions on two ranks as on one process."""

from functools import partial

import pytest
import torch
from support.harness import run_ranks

pytestmark = pytest.mark.distributed
ROWS, HORIZON = 4, 6
CHUNK = {"horizon": HORIZON, "action_dim": 3, "action_steps": 2}


def policy():
    from foundry.models.vlm import PrefixVLM
    from foundry.tasks.robots.models.vla import VLA

    torch.manual_seed(0)
    widths = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    backbone = PrefixVLM(vocab_size=31, max_seq_len=5, image_size=16, **widths)
    model = VLA(backbone=backbone, state_dim=4, action_dim=3, num_observations=1, horizon=HORIZON, intermediate_size=24)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def rows():
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(31, (ROWS, 5), generator=draw)
    return {
        "actions": torch.rand(ROWS, HORIZON, 3, generator=draw) * 2 - 1,
        "state": torch.randn(ROWS, 1, 4, generator=draw),
        "images": torch.randint(256, (ROWS, 1, 3, 16, 16), dtype=torch.uint8, generator=draw),
        "instruction": words.masked_fill(torch.arange(5) > torch.arange(ROWS)[:, None], -1),
        "is_padded": torch.zeros(ROWS, HORIZON, dtype=torch.bool),
        "position": torch.arange(ROWS),
    }


def measure(parallel, own):
    """Return the actions of all rows before training, the loss on the rows `own`, and the gradients."""
    from foundry.core.sharded import is_sharded
    from foundry.parallel.whole_weights import gathered
    from foundry.tasks.robots.action_chunks import FlowPolicy

    objective, batch = FlowPolicy(seed=5, **CHUNK), rows()
    seen = {name: batch[name] for name in ("state", "images", "instruction")}
    with torch.no_grad(), gathered(parallel.model) as whole:
        answers = objective.act(whole, seen, torch.arange(ROWS))
    loss = objective.loss(parallel.model, {name: value[own] for name, value in batch.items()}).loss
    loss.backward()
    found = {n: parameter.grad for n, parameter in parallel.inner.named_parameters() if parameter.requires_grad}
    return answers, loss.detach(), {n: (g.full_tensor() if is_sharded(g) else g).clone() for n, g in found.items()}


def wrap(world, strategy, *, grad_checkpointing):
    from support.composition import configure

    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    count = f"distributed.nproc_per_node={world.world_size}"
    config = configure(f"distributed={strategy}", count, "precision=fp32", "hparams.per_gpu_batch_size=1")
    precision = PrecisionPolicy(config.precision.mode)
    return parallelize(
        precision.prepare(policy()),
        precision,
        arrange(world, config.distributed),
        grad_checkpointing=grad_checkpointing,
        torchcompile=False,
    )


def check(world, grad_checkpointing, expected_answers, expected_loss, expected):
    from foundry.parallel.gathering import gather

    for strategy in ("ddp", "fsdp"):
        parallel = wrap(world, strategy, grad_checkpointing=grad_checkpointing)
        answers, loss, found = measure(parallel, slice(2 * world.rank, 2 * world.rank + 2))
        assert torch.equal(answers, expected_answers)
        torch.testing.assert_close(torch.tensor(sum(gather(loss.item(), world))), expected_loss)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            # Two ranks average their gradients, one process sums.
            message = partial("{}: {}".format, name)
            torch.testing.assert_close(2 * found[name], gradient, rtol=1e-4, atol=1e-5, msg=message)


@pytest.mark.parametrize("grad_checkpointing", [pytest.param(False, marks=pytest.mark.long), True])
def test_vla_on_two_ranks_matches_one_process(grad_checkpointing):
    from foundry.parallel.gradient_sync import LocalSync
    from foundry.parallel.wrap import Parallel

    run_ranks(check, 2, grad_checkpointing, *measure(Parallel(policy(), LocalSync()), slice(0, ROWS)))
