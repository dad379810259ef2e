"""One optimizer step on one process."""

import json
import math
import re

import pytest
import torch
from support.devices import alone_on
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from foundry.config.schemas.guard import Guard
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.errors import ConfigError
from foundry.core.protocols import LossSum, Mean, Window
from foundry.optim.optimizers import adamw
from foundry.parallel.gradient_sync import LocalSync
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.training.guards import NonFiniteError, UpdateGuard
from foundry.training.metric_sums import read_means
from foundry.training.step import TrainStep, to_device

ALONE = World.single(torch.device("cpu"))
ADAMW = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


class Squares:
    """Half the squared error over the samples whose `valid` is 1."""

    def num_valid(self, microbatch):
        return int(microbatch["valid"].sum())

    def loss(self, model, microbatch):
        error = (model(microbatch["x"]).squeeze(-1) - microbatch["y"]) * microbatch["valid"]
        return LossSum(0.5 * error.square().sum(), {"absolute_error": Mean(error.abs().sum())})


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def window(sizes=(8,), valid=None, seed=1):
    """Split one batch into microbatches of `sizes` samples."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    batch = {
        "x": torch.randn(total, 3, generator=generator),
        "y": torch.randn(total, generator=generator),
        "valid": torch.ones(total) if valid is None else torch.tensor(valid, dtype=torch.float32),
        "position": torch.arange(total),
    }
    cuts = {name: tensor.split(list(sizes)) for name, tensor in batch.items()}
    return Window([{name: cuts[name][i] for name in cuts} for i in range(len(sizes))], total)


def step_for(
    model,
    objective=None,
    *,
    max_grad_norm=None,
    mode=PrecisionMode.fp32,
    optimizers=None,
    guard=None,
    world=ALONE,
    forward_backward=None,
):
    return TrainStep(
        model=model,
        objective=objective or Squares(),
        optimizers=adamw(model=model, **ADAMW) if optimizers is None else optimizers,
        sync=LocalSync(),
        precision=PrecisionPolicy(mode),
        world=world,
        max_grad_norm=max_grad_norm,
        guard=guard,
        forward_backward=forward_backward,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_step_matches_a_hand_written_step():
    model, reference = linear(), linear()
    step = step_for(model)
    optimizer = torch.optim.AdamW(
        [{"params": [reference.weight], "weight_decay": 0.1}, {"params": [reference.bias], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for number in range(1, 4):
        batch = window(seed=number).microbatches[0]
        error = reference(batch["x"]).squeeze(-1) - batch["y"]
        loss = 0.5 * error.square().mean()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / number
        optimizer.step()
        optimizer.zero_grad()
        result = step(window(seed=number), 1e-2 / number, number)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-6)
        assert read_means(result.metrics)[0]["absolute_error"] == pytest.approx(error.abs().mean().item(), rel=1e-6)
    for name, expected in reference.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], expected)
    assert all(p.grad is None for p in model.parameters())


def test_unequal_microbatches_are_weighted_by_their_valid_items():
    valid = [1, 0, 0, 0, 1, 1, 1, 1]
    whole, cut = linear(), linear()
    one = step_for(whole)(window((8,), valid), 1e-2, 1)
    other = step_for(cut)(window((4, 3, 1), valid), 1e-2, 1)
    assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-6)
    assert other.grad_norm.item() == pytest.approx(one.grad_norm.item(), rel=1e-6)
    for name, expected in whole.named_parameters():
        torch.testing.assert_close(dict(cut.named_parameters())[name], expected)


def test_window_without_valid_items_applies_weight_decay_only():
    model = linear()
    before = weights(model)
    result = step_for(model, max_grad_norm=1.0)(window((4, 4), [0] * 8), 1e-2, 1)
    assert read_means(result.metrics, result.loss, result.grad_norm) == ({}, [0.0, 0.0])
    torch.testing.assert_close(model.weight.detach(), before["weight"] * (1 - 1e-2 * 0.1))
    assert torch.equal(model.bias, before["bias"])


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_bounds_the_norm_and_reports_the_unclipped_norm(max_norm):
    model, plain = linear(), linear()
    step, seen = step_for(model, max_grad_norm=max_norm), []
    for optimizer in step._optimizers:
        optimizer.register_step_pre_hook(
            lambda o, args, kwargs: seen.append(
                math.sqrt(sum(float(p.grad.square().sum()) for g in o.param_groups for p in g["params"]))
            )
        )
    result = step(window(), 1e-2, 1)
    unclipped = step_for(plain)(window(), 1e-2, 1).grad_norm.item()
    assert result.grad_norm.item() == unclipped
    assert seen == pytest.approx([min(unclipped, max_norm)], rel=1e-4)


def test_step_uses_the_given_learning_rate():
    model = linear()
    before = weights(model)
    step = step_for(model)
    step(window(), 0.0, 1)
    assert same(before, weights(model))
    step(window(), 1e-3, 2)
    assert not same(before, weights(model))


def test_weight_decay_of_the_optimizer_applies_unless_given():
    model = linear()
    step = step_for(model)
    (optimizer,) = step._optimizers
    step(window(), 1e-3, 1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    step(window(), 1e-3, 2, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


class Broken(Squares):
    """Finite before call number `at` of the loss; from then on, the loss or only its gradient is not finite."""

    def __init__(self, at, kind):
        self.at, self.kind, self.calls = at, kind, 0

    def loss(self, model, microbatch):
        self.calls += 1
        part = super().loss(model, microbatch)
        if self.calls < self.at:
            return part
        if self.kind == "gradient":
            # sqrt has a finite value and an infinite slope at 0.
            return LossSum(part.loss + (model.weight - model.weight.detach()).abs().sum().sqrt(), part.metrics)
        return LossSum(part.loss * float(self.kind), part.metrics)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("nan", "the loss on rank 0"), ("inf", "the loss on rank 0"), ("gradient", "the gradient norm")],
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_nonfinite_loss_or_gradient_stops_before_the_update(kind, cause, clip):
    model = linear()
    step = step_for(model, Broken(3, kind), max_grad_norm=clip)
    step(window(seed=1), 1e-2, 1)
    step(window(seed=2), 1e-2, 2)
    before = weights(model)
    moments = [{k: v.clone() for k, v in state.items()} for o in step._optimizers for state in o.state.values()]
    with pytest.raises(NonFiniteError, match=f"^step 3: {cause} is not finite; this step did not change the weights"):
        step(window(seed=3), 1e-2, 3)
    assert same(before, weights(model))
    after = [state for o in step._optimizers for state in o.state.values()]
    assert all(same(one, other) for one, other in zip(moments, after, strict=True))


def test_one_nonfinite_microbatch_of_many_is_detected():
    step = step_for(linear(), Broken(3, "nan"))
    with pytest.raises(NonFiniteError, match="step 1: the loss on rank 0"):
        step(window((2, 2, 2, 2)), 1e-2, 1)


def test_fp16_skips_an_overflow_and_continues():
    model = linear()
    before = weights(model)
    step = step_for(model, mode=PrecisionMode.amp_float16)
    overflowing = window()
    overflowing.microbatches[0]["x"] *= 1e4  # Finite in fp32; its products with the loss scale overflow fp16.
    step(overflowing, 1e-2, 1)
    assert same(before, weights(model))
    moved = 0
    for number in range(2, 12):
        step(window(seed=number), 1e-2, number)
        moved += not same(before, weights(model))
    assert moved > 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def poisoned(seed):
    bad = window(seed=seed)
    bad.microbatches[0]["x"][0, 0] = math.nan
    return bad


def on_device(model, config=None, make=adamw, **options):
    """Return a step whose guard decides on the device, as on a GPU, and synchronizes only at logged steps."""
    step = step_for(model, optimizers=make(model=model, **(options or ADAMW)), guard=config)
    step.guard = UpdateGuard(config or Guard(), step._optimizers, ALONE, on_device=True)
    return step


@pytest.mark.parametrize("asked", [True, False])
def test_device_guard_skips_a_bad_step_and_all_later_ones(asked):
    model = linear()
    step = on_device(model)
    step(window(seed=1), 1e-2, 1)
    before = weights(model)
    assert step(poisoned(2), 1e-2, 2).skipped is False
    with pytest.raises(NonFiniteError, match=r"^step 2: the loss on rank 0 .* did not change the weights"):
        step.guard.check() if asked else step(window(seed=3), 1e-2, 3)
    assert same(before, weights(model))


def test_fp16_stops_at_a_gradient_that_no_scale_makes_finite():
    model = linear()
    before = weights(model)
    step = step_for(model, Broken(1, "gradient"), mode=PrecisionMode.amp_float16)
    for number in range(1, 18):
        assert step(window(), 1e-2, number).skipped is True
    with pytest.raises(NonFiniteError, match=r"^step 18: the gradient norm is not finite"):
        step(window(), 1e-2, 18)
    assert same(before, weights(model))


@pytest.mark.parametrize("mode", [PrecisionMode.fp32, PrecisionMode.amp_float16])
def test_step_state_survives_json(mode):
    first = step_for(linear(), mode=mode, guard=Guard(spike_zscore=6.0))
    overflowing = window()
    overflowing.microbatches[0]["x"] *= 1e4
    for number in range(1, 4):
        first(overflowing, 1e-2, number)
    state = json.loads(json.dumps(first.state_dict()))
    assert len(state["guard"]["losses"]) == 3
    assert state["scaler"] == (None if mode is PrecisionMode.fp32 else {"scale": 2.0**13, "good_steps": 0})
    second = step_for(linear(), mode=mode, guard=Guard(spike_zscore=6.0))
    second.load_state_dict(state)
    assert second.state_dict() == state


def test_fp16_stops_at_a_loss_that_no_scale_makes_finite():
    model = linear()
    before = weights(model)
    infinite = window()
    infinite.microbatches[0]["y"][0] = math.inf
    with pytest.raises(NonFiniteError, match="step 1"):
        step_for(model, mode=PrecisionMode.amp_float16)(infinite, 1e-2, 1)
    assert same(before, weights(model))


def test_undeclared_metric_of_an_objective_is_refused():
    class Named(Squares):
        metrics = ("other",)

        def loss(self, model, microbatch):
            return super().loss(model, microbatch)

    with pytest.raises(ConfigError, match="absolute_error, which its `metrics` does not list"):
        step_for(linear(), Named())(window(), 1e-2, 1)


def test_custom_forward_backward_makes_the_same_step():
    one, other = linear(), linear()

    def at_once(microbatches, num_valid, scale):
        merged = {name: torch.cat([part[name] for part in microbatches]) for name in microbatches[0]}
        sums = Squares().loss(other, merged)
        (sums.loss * scale).backward()
        return LossSum(sums.loss.detach(), {"absolute_error": Mean(torch.ones(()), sum(num_valid))})

    plain, whole = step_for(one), step_for(other, forward_backward=at_once)
    first, second = plain(window((4, 4)), 1e-2, 1), whole(window((4, 4)), 1e-2, 1)
    assert second.loss.item() == pytest.approx(first.loss.item(), rel=1e-6)
    assert read_means(second.metrics)[0] == {"absolute_error": 0.125}
    torch.testing.assert_close(other.weight, one.weight)


class Rounded(TorchDispatchMode):
    """Counts casts of tensors with a given shape to bfloat16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.times = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        narrows = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
        self.times += narrows and args[0].shape == self.shape
        return func(*args, **kwargs)


@pytest.mark.gpu
def test_autocast_rounds_a_weight_once_per_window_on_a_gpu():
    """Also with checkpointing: a backward pass in its own thread would round the weight in each microbatch."""
    model = linear().to("cuda")
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    step = step_for(model, mode=PrecisionMode.amp_bfloat16, world=alone_on("cuda"))
    step(window((2, 3, 3)), 1e-2, 1)
    with Rounded(model.weight.shape) as rounded:
        step(window((2, 3, 3)), 1e-2, 2)
    assert rounded.times == 1


@pytest.mark.parametrize("recomputes", [False, True])
def test_autocast_rounds_a_weight_once_per_window(recomputes):
    model, reference = linear(), linear()
    forward = model.forward
    if recomputes:
        model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    step, objective, batch = step_for(model, mode=PrecisionMode.amp_bfloat16), Squares(), window((2, 3, 3))
    for number in (1, 2):
        with Rounded(model.weight.shape) as rounded:
            result = step(batch, 1e-2, number)
        assert rounded.times == 1
        if number == 1:
            for part in batch.microbatches:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = objective.loss(reference, part).loss / 8
                loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
            assert result.grad_norm == norm


def test_batch_entries_read_by_the_host_stay_on_the_cpu():
    number = torch.tensor(3)
    moved = to_device({"tokens": number, "position": number, "longest_document": number}, torch.device("meta"))
    assert {name: tensor.device.type for name, tensor in moved.items()} == {
        "tokens": "meta",
        "position": "cpu",
        "longest_document": "cpu",
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda part: part.loss, "an object of type Tensor"),
        (lambda part: None, "an object of type NoneType"),
        (lambda part: LossSum(part.loss.expand(2, 1)), "losses of shape (2, 1)"),
        (lambda part: LossSum(part.loss.detach()), "a loss without a gradient"),
    ],
)
def test_result_of_an_objective_that_is_no_sum_is_refused(change, problem):
    class Changed(Squares):
        def loss(self, model, microbatch):
            return change(super().loss(model, microbatch))

    model = linear()
    before = weights(model)
    message = "objective._target_: builds Changed, whose loss() returns {} but must return a LossSum of "
    with pytest.raises(ConfigError, match=re.escape(message.format(problem))):
        step_for(model, Changed())(window(), 1e-2, 1)
    assert same(before, weights(model))
