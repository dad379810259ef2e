"""The options of Muon match an update of single matrices, written out; shards have the same bits as whole matrices."""

import pytest
import torch
from torch import nn

from foundry.optim.muon import Muon

SHAPES = [(8, 20), (20, 8), (8, 8), (8, 20), (1, 6), (6, 1)]
STEPS = 6
LR, WEIGHT_DECAY, NS_STEPS = 0.05, 0.5, 5
OPTIONS = {"cautious_weight_decay": True}
CASES = [{}, *({name: value} for name, value in OPTIONS.items())]


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def momentum_at(step):
    """Return a momentum that rises as in a warm-up."""
    return 0.8 + 0.03 * min(step, 5)


def orthogonalised(matrix):
    """Return the result of the Newton-Schulz iteration in float64."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def written_out(weight, gradients, *, nesterov, cautious_weight_decay=False):
    """Return a weight after the updates of these gradients, in float64."""
    weight, velocity = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        momentum = momentum_at(step)
        velocity = momentum * velocity + (1 - momentum) * gradient.double()
        ahead = momentum * velocity + (1 - momentum) * gradient.double() if nesterov else velocity
        update = orthogonalised(ahead)
        update = 0.2 * max(weight.shape) ** 0.5 * update
        decay = WEIGHT_DECAY * weight
        if cautious_weight_decay:
            decay = torch.where(update * weight >= 0, decay, 0.0)
        weight = weight - LR * (update + decay)
    return weight


def train(place=torch.clone, *, ns_dtype=torch.float32, held_in=torch.float32, group=None, nesterov=True, **options):
    """Return the optimizer and the matrices after the steps; `place` distributes a tensor."""
    matrices = [nn.Parameter(place(tensor.to(held_in))) for tensor in draw(0)]
    optimizer = Muon(
        matrices,
        lr=LR,
        momentum=0.5,
        nesterov=nesterov,
        ns_steps=NS_STEPS,
        ns_dtype=ns_dtype,
        weight_decay=WEIGHT_DECAY,
        group=group,
        **options,
    )
    for step in range(STEPS):
        optimizer.param_groups[0]["momentum"] = momentum_at(step)
        for matrix, gradient in zip(matrices, draw(1 + step), strict=True):
            matrix.grad = place(gradient.to(held_in))
        optimizer.step()
    return optimizer, matrices


@pytest.mark.parametrize("options", CASES, ids=lambda options: "+".join(options) or "none")
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_with_options_matches_the_formula(options, nesterov):
    _, matrices = train(nesterov=nesterov, **options)
    gradients = zip(*(draw(1 + step) for step in range(STEPS)), strict=True)
    for matrix, start, given in zip(matrices, draw(0), gradients, strict=True):
        expected = written_out(start, given, nesterov=nesterov, **options)
        assert torch.allclose(matrix.double(), expected, rtol=0, atol=2e-4), tuple(matrix.shape)


def test_each_option_changes_each_matrix():
    _, plain = train()
    for name, value in OPTIONS.items():
        _, matrices = train(**{name: value})
        for matrix, other in zip(matrices, plain, strict=True):
            assert (matrix - other).abs().max() > 1e-3, (name, tuple(matrix.shape))
