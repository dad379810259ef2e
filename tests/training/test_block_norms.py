"""Norms by block, compared with norms computed by hand."""

import pytest
import torch
from torch import nn

from foundry.config.schemas.guard import Guard, NonFinite
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.schemas.tracking import Tracking
from foundry.core.protocols import LossSum, Window
from foundry.models.fsdp_block import FSDPBlock, find_blocks
from foundry.parallel.gradient_sync import LocalSync
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.training.block_norms import BlockNorms, group_by_block
from foundry.training.step import TrainStep

CPU = torch.device("cpu")


class Block(FSDPBlock):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Module()
        self.trunk.embed = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.trunk.layers = nn.ModuleList(Block() for _ in range(2))
        self.trunk.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        x = self.trunk.embed(x)
        for layer in self.trunk.layers:
            x = layer(x)
        return self.head(self.frozen(x) * self.trunk.scale)


class Squares:
    metrics = ()

    def num_valid(self, microbatch):
        return len(microbatch["x"])

    def loss(self, model, microbatch):
        return LossSum((model(microbatch["x"]) - 1).square().sum(), {})


def norm(tensors):
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


def test_parameters_are_grouped_by_block_under_their_module_names():
    model = Model()
    grouped = group_by_block(model, find_blocks(model))
    assert list(grouped) == ["trunk.scale", "trunk.embed", "trunk.layers.0", "trunk.layers.1", "head"]
    assert [len(parameters) for parameters in grouped.values()] == [1, 4, 4, 4, 2]
    assert grouped["head"] == [model.head.weight, model.head.bias]


def step_for(model, every, **guard):
    return TrainStep(
        model=model,
        objective=Squares(),
        optimizers=[torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)],
        sync=LocalSync(),
        precision=PrecisionPolicy(PrecisionMode.fp32),
        world=World.single(CPU),
        max_grad_norm=1e-3,
        guard=Guard(**guard),
        norms=BlockNorms(group_by_block(model, find_blocks(model)), every_n_steps=every, device=CPU),
    )


def window(seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return Window([{"x": scale * torch.randn(4, 3, generator=generator)} for _ in range(2)], 8)


def test_block_norms_are_pre_clipping_and_measure_the_actual_update():
    model, twin = Model(), Model()
    step = step_for(model, 2)
    result = step(window(), 0.1, 1)
    (sum((twin(m["x"]) - 1).square().sum() for m in window().microbatches) / 8).backward()
    expected = group_by_block(twin, find_blocks(twin))
    now = group_by_block(model, find_blocks(model))
    found = result.norms.read()
    assert len(found) == 3 * len(expected)
    for name, before in expected.items():
        assert found[f"grad_norm/{name}"] == pytest.approx(norm([p.grad for p in before]), rel=1e-5)
        assert found[f"weight_norm/{name}"] == pytest.approx(norm(before), rel=1e-6)
        changed = [b.detach() - a.detach() for b, a in zip(before, now[name], strict=True)]
        assert found[f"update_norm/{name}"] == pytest.approx(norm(changed), rel=1e-6)
    whole = norm([torch.tensor([found[f"grad_norm/{name}"] for name in expected])])
    assert whole == pytest.approx(result.grad_norm.item(), rel=1e-6)
    assert whole > 0.01, "clipping took most of it"
    assert norm([torch.tensor([found[f"update_norm/{name}"] for name in expected])]) == pytest.approx(1e-4, rel=1e-2)


def test_block_norms_are_measured_every_n_steps_and_zero_if_skipped():
    model = Model()
    step = step_for(model, 3, non_finite=NonFinite.skip, max_skips=2)
    assert [step(window(), 0.1, number).norms is None for number in (1, 2, 3, 4)] == [False, True, False, True]
    left_out = step(window(scale=float("inf")), 0.1, 6)
    found = left_out.norms.read()
    assert left_out.skipped
    assert {value for name, value in found.items() if name.startswith("update_norm/")} == {0.0}


def test_parameter_without_a_gradient_has_zero_grad_norm():
    one, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((9,), 2.0))
    one.grad = torch.full((4,), 3.0)
    norms = BlockNorms({"a": [one], "b": [other]}, every_n_steps=1, device=CPU)
    found = norms.after_update(norms.before_update()).read()
    assert found["grad_norm/a"] == 6
    assert (found["grad_norm/b"], found["weight_norm/b"], found["update_norm/b"]) == (0, 6, 0)


def test_norms_interval_between_logged_steps_is_refused():
    assert not list(Tracking(norms_every_n_steps=30, log_every_n_steps=10).check())
    (wrong,) = Tracking(norms_every_n_steps=15, log_every_n_steps=10).check()
    assert wrong.key == "tracking.norms_every_n_steps"
    assert "set a multiple of 10" in wrong.message
