"""AdamW with cautious weight decay matches an update of single tensors, written out."""

from collections import Counter

import pytest
import torch
from support.composition import EQUAL_RATES, configure
from support.harness import run_ranks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from foundry.optim.adamw_bf16 import Bf16AdamW
from foundry.optim.adamw_cautious import CautiousAdamW, CautiousBf16AdamW
from foundry.optim.eager import AdamW
from foundry.optim.optimizers import adamw, muon

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5}
SHAPES = [(7, 5), (33,), (), (64, 3)]


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def written_out(weight, gradients, weight_decay, rounds):
    """Return the weight after these gradients, in float64; `rounds` rounds the moments to bf16."""
    weight, (beta1, beta2) = weight.double(), OPTIONS["betas"]
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, 1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        update = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + OPTIONS["eps"])
        mask = (update * weight >= 0).double()
        weight = weight - OPTIONS["lr"] * (update + weight_decay * mask * weight)
        if rounds:
            first, second = first.bfloat16().double(), second.bfloat16().double()
    return weight


@pytest.mark.parametrize("kind", [CautiousAdamW, CautiousBf16AdamW])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("weight_decay", [0.5, 0.0])
def test_cautious_adamw_matches_the_formula(kind, fused, weight_decay):
    parameters = [nn.Parameter(tensor) for tensor in draw(0)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": weight_decay}]
    optimizer = kind(groups, **OPTIONS, fused=fused)
    for step in range(10):
        for parameter, gradient in zip(parameters, draw(1 + step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, weight_decay]
    gradients = list(zip(*(draw(1 + step) for step in range(10)), strict=True))
    decays = [0.5, 0.5, weight_decay, weight_decay]
    rounds = kind is CautiousBf16AdamW
    for parameter, start, given, decay in zip(parameters, draw(0), gradients, decays, strict=True):
        expected = written_out(start, given, decay, rounds)
        assert torch.allclose(parameter.double(), expected, rtol=1e-5, atol=1e-3 if rounds else 1e-6)
        if decay and start.numel() > 1:
            assert not torch.allclose(expected, written_out(start, given, 0.0, rounds), atol=5e-3)


@pytest.mark.parametrize("kind", [CautiousAdamW, CautiousBf16AdamW])
def test_hooks_of_torch_run_once_per_step(kind):
    """Torch wraps the step of each class when it creates the first optimizer of the class."""
    counts = Counter()
    for other in (AdamW, Bf16AdamW, kind):
        optimizer = other([nn.Parameter(torch.ones(3))], **OPTIONS)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    hooks = [
        register_optimizer_step_pre_hook(lambda *arguments: counts.update(["global pre"])),
        register_optimizer_step_post_hook(lambda *arguments: counts.update(["global post"])),
        optimizer.register_step_pre_hook(lambda *arguments: counts.update(["pre"])),
        optimizer.register_step_post_hook(lambda *arguments: counts.update(["post"])),
    ]
    optimizer.step()
    for hook in hooks:
        hook.remove()
    assert counts == {"global pre": 1, "global post": 1, "pre": 1, "post": 1}


def test_weight_decay_applies_only_where_the_update_moves_a_weight_towards_zero():
    weights = [nn.Parameter(torch.tensor([2.0, -2.0, 2.0, -2.0, 0.0, 2.0])) for _ in range(2)]
    gradient = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 0.0])
    for weight, kind in zip(weights, (CautiousAdamW, AdamW), strict=True):
        weight.grad = gradient.clone()
        kind([weight], **{**OPTIONS, "weight_decay": 0.0 if kind is AdamW else 0.5}).step()
    cautious, undecayed = weights
    assert torch.allclose(cautious - undecayed, torch.tensor([-0.01, 0.0, 0.0, 0.01, 0.0, -0.01]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [CautiousAdamW, CautiousBf16AdamW])
def test_cautious_adamw_changes_nothing_if_found_inf(kind):
    parameters = [nn.Parameter(tensor) for tensor in draw(0)]
    optimizer = kind(parameters, **OPTIONS, fused=True)
    for step, found in enumerate((0.0, 1.0, 0.0)):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter, gradient in zip(parameters, draw(1 + step), strict=True):
            parameter.grad = gradient
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found)
        optimizer.step()
        assert all(torch.equal(p, old) == bool(found) for p, old in zip(parameters, before, strict=True))


def sharded_and_whole(world):
    """Return, for each class and tensor, whether shards have the bits of the whole tensor after three steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))
    shapes = [number for number, shape in enumerate(SHAPES) if shape]
    equal = []
    for kind in (CautiousAdamW, CautiousBf16AdamW):
        after = []
        for place in (torch.clone, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])):
            parameters = [nn.Parameter(place(draw(0)[number])) for number in shapes]
            optimizer = kind(parameters, **OPTIONS)
            for step in range(3):
                for parameter, number in zip(parameters, shapes, strict=True):
                    parameter.grad = place(draw(1 + step)[number])
                optimizer.step()
            after.append(parameters)
        equal += [torch.equal(one, other.full_tensor()) for one, other in zip(*after, strict=True)]
    return equal


@pytest.mark.distributed
def test_cautious_adamw_of_shards_equals_that_of_whole_tensors():
    for equal in run_ranks(sharded_and_whole, 2):
        assert equal == [True] * 6


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (["optimizer=adamw"], [AdamW]),
        (["optimizer=adamw", "optimizer.cautious_weight_decay=true"], [CautiousAdamW]),
        (
            ["optimizer=adamw", "optimizer.cautious_weight_decay=true", "optimizer.moments_dtype=bf16"],
            [CautiousBf16AdamW],
        ),
        (["optimizer=muon", *EQUAL_RATES], [AdamW]),
        (["optimizer=muon", *EQUAL_RATES, "optimizer.cautious_weight_decay=true"], [CautiousAdamW]),
    ],
)
def test_cautious_weight_decay_selects_its_classes(overrides, kinds):
    make = muon if overrides[0] == "optimizer=muon" else adamw
    optimizers = make(configure(*overrides).optimizer, model=nn.Linear(3, 3), lr=1e-2)
    assert [type(optimizer) for optimizer in optimizers] == kinds
