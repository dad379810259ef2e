"""Gradients through the decoder's keys and values under DDP and FSDP2 match one process."""

from functools import partial

import pytest
import torch
from support.harness import run_ranks
from torch import nn

from foundry.models.vlm import PrefixVLM

pytestmark = pytest.mark.distributed


class Reader(nn.Module):
    """A module that reads the hidden states, and the keys and values of every layer, like an action expert."""

    def __init__(self):
        super().__init__()
        self.backbone = PrefixVLM(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            max_seq_len=6,
            image_size=16,
            init_std=0.2,
        )
        self.weights = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, tokens, images):
        """Return one value per row."""
        hidden, kept, is_visible = self.backbone.trunk(tokens, images)
        of_layers = [
            (weight * (key.tanh() * value) * is_visible[:, None, :, None]).sum((1, 2, 3))
            for weight, (key, value) in zip(self.weights, kept, strict=True)
        ]
        return sum(of_layers) + 0.1 * hidden.tanh().sum((1, 2))


def rows():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(31, (4, 6), generator=generator)
    tokens[1, 4:] = -1
    return tokens, torch.randint(256, (4, 1, 3, 16, 16), dtype=torch.uint8, generator=generator)


def gradients(world, strategy, *, grad_checkpointing):
    """Return the outputs of this rank's rows, and all gradients, which are averaged over ranks."""
    from support.composition import configure

    from foundry.core.sharded import is_sharded
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    torch.manual_seed(0)
    count = f"distributed.nproc_per_node={world.world_size}"
    config = configure(f"distributed={strategy}", count, "precision=fp32", "hparams.per_gpu_batch_size=1")
    policy = PrecisionPolicy(config.precision.mode)
    parallel = parallelize(
        policy.prepare(Reader()),
        policy,
        arrange(world, config.distributed),
        grad_checkpointing=grad_checkpointing,
        torchcompile=False,
    )
    own = slice(2 * world.rank, 2 * world.rank + 2) if world.world_size > 1 else slice(0, 4)
    answer = parallel.model(*(tensor[own] for tensor in rows()))
    answer.mean().backward()
    found = {name: parameter.grad for name, parameter in parallel.inner.named_parameters()}
    return answer.detach(), {n: (g.full_tensor() if is_sharded(g) else g).clone() for n, g in found.items()}


def check(world, grad_checkpointing, expected_answers, expected):
    from foundry.parallel.gathering import gather

    for strategy in ("ddp", "fsdp"):
        answers, found = gradients(world, strategy, grad_checkpointing=grad_checkpointing)
        of_all = [answer for own in gather(answers.tolist(), world) for answer in own]
        torch.testing.assert_close(torch.tensor(of_all), expected_answers)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("grad_checkpointing", [False, True])
def test_gradients_through_keys_and_values_match_one_process(grad_checkpointing):
    torch.manual_seed(0)
    model = Reader()
    answers = model(*rows())
    answers.mean().backward()
    # The last block's queries, output and feed-forward affect only the hidden states; the head is the tied embedding.
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in expected.values())
    run_ranks(check, 2, grad_checkpointing, answers.detach(), expected)
