"""Guards of a training step: skipped updates, continuation and termination."""

import json
import logging
import math

import pytest
import torch
from test_step import ADAMW, on_device, poisoned, same, step_for, weights, window
from torch import nn

from foundry.config.schemas.guard import Guard, NonFinite, SpikeAction
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.ema import WeightAverage
from foundry.models.fsdp_block import FSDPBlock
from foundry.optim.optimizers import adamw, muon, sgd
from foundry.parallel.process_group import World
from foundry.training.guards import LossSpike, LossWindow, NonFiniteError, PersistentSpikeError

SKIP = Guard(non_finite=NonFinite.skip)
SGD = {"lr": 1e-2, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1}
MUON = {**ADAMW, "momentum": 0.95, "nesterov": True, "ns_steps": 5}


class Block(FSDPBlock):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.inner(x)


def model_of(seed=0):
    """Return a model with a matrix in a block, for Muon, and other parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(Block(), nn.Linear(3, 1))


def states(step):
    """Return copies of the optimizer states of a training step."""
    return [
        {name: value.clone() for name, value in state.items() if value is not None}
        for optimizer in step._optimizers
        for state in optimizer.state.values()
    ]


def on_host(model, config, make, **options):
    return step_for(model, optimizers=make(model=model, **options), guard=config)


@pytest.mark.parametrize(("make", "options"), [(adamw, ADAMW), (sgd, SGD), (muon, MUON)], ids=["adamw", "sgd", "muon"])
@pytest.mark.parametrize("place", [on_host, on_device])
@pytest.mark.parametrize("bad", [1, 3], ids=["first", "later"])
def test_run_with_a_skipped_step_matches_a_run_without_it(make, options, place, bad):
    skipping, plain = model_of(), model_of()
    ours, theirs = place(skipping, SKIP, make, **options), on_host(plain, None, make, **options)
    averages = WeightAverage(skipping, 0.5), WeightAverage(plain, 0.5)
    for number in range(1, 6):
        result = ours(poisoned(number) if number == bad else window(seed=number), 1e-2, number)
        averages[0].update(result.skipped)
        assert bool(result.skipped) == (number == bad)
        assert isinstance(result.skipped, torch.Tensor) == (place is on_device)
        if number != bad:
            theirs(window(seed=number), 1e-2, number)
            averages[1].update()
    ours.guard.check()
    assert same(weights(skipping), weights(plain))
    assert same(averages[0].average, averages[1].average)
    one, other = states(ours), states(theirs)
    assert len(one) == len(other) > 0
    assert all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("place", [on_host, on_device])
def test_skip_warning_names_step_rank_and_samples(place, caplog):
    step = place(model_of(), SKIP, adamw, **ADAMW)
    with caplog.at_level(logging.WARNING):
        step(window((4, 4), seed=1), 1e-2, 1)
        bad = window((4, 4), seed=2)
        bad.microbatches[1]["y"][0] = math.nan
        for microbatch in bad.microbatches:
            microbatch["position"] += 8
        step(bad, 1e-2, 2)
        step.guard.check()
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: the loss on rank 0 is not finite; its update is skipped, 1 in a row of at most 3 "
        "(samples 8 to 15 of the global order)"
    ]


@pytest.mark.parametrize("place", [on_host, on_device])
def test_more_than_max_skips_in_a_row_end_the_run(place):
    step = place(model_of(), Guard(non_finite=NonFinite.skip, max_skips=2), adamw, **ADAMW)

    def take(number, bad):
        step(poisoned(number) if bad else window(seed=number), 1e-2, number)
        step.guard.check()

    for number, bad in enumerate([True, True, False, True, True], start=1):
        take(number, bad)
    before = weights(step.model)
    message = (
        r"^step 6: the loss on rank 0 is not finite, after 2 updates in a row that were skipped \(guard.max_skips=2\)"
    )
    with pytest.raises(NonFiniteError, match=message):
        take(6, True)
    assert same(before, weights(step.model))


def test_device_guard_stops_updates_after_max_skips():
    model = model_of()
    step = on_device(model, Guard(non_finite=NonFinite.skip, max_skips=1))
    step(poisoned(1), 1e-2, 1)
    before = weights(model)
    step(poisoned(2), 1e-2, 2)
    with pytest.raises(NonFiniteError, match="step 2"):
        step(window(seed=3), 1e-2, 3)
    assert same(before, weights(model))


def test_fp16_skips_a_bad_loss_without_counting_overflows(caplog):
    model = model_of()
    step = step_for(model, mode=PrecisionMode.amp_float16, guard=Guard(non_finite=NonFinite.skip, max_skips=1))
    overflowing = window()
    overflowing.microbatches[0]["x"] *= 1e4
    before = weights(model)
    assert [bool(step(overflowing, 1e-2, number).skipped) for number in (1, 2, 3)] == [True] * 3
    assert caplog.records == []
    infinite = window()
    infinite.microbatches[0]["y"][0] = math.inf
    assert step(infinite, 1e-2, 4).skipped is True
    assert same(before, weights(model))
    assert len(caplog.records) == 1
    skipped = [bool(step(window(seed=number), 1e-2, number).skipped) for number in range(5, 15)]
    assert not all(skipped)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_spike_zscore_is_the_modified_zscore_of_iglewicz_and_hoaglin():
    known = LossWindow(8)
    known.losses.extend([2.1, 2.6, 2.4, 2.5, 2.3, 2.1, 2.3, 2.6])  # Median 2.35; median absolute deviation 0.2.
    assert known.zscore(8.2) == pytest.approx(0.6745 * 5.85 / 0.2)
    assert known.zscore(0.1) < 0


def test_spike_zscore_is_zero_for_few_or_equal_losses():
    known = LossWindow(16)
    for loss in (1.0, 1.1, 1.2):
        known.losses.append(loss)
        assert known.zscore(100.0) == 0.0
    known.losses.append(1.3)
    assert known.zscore(100.0) > 100
    equal = LossWindow(8)
    equal.losses.extend([1.0] * 8)
    assert equal.zscore(100.0) == 0.0


def spiked(seed):
    """Return a window with finite but far-off targets."""
    bad = window(seed=seed)
    bad.microbatches[0]["y"] += 100.0
    return bad


def spike_step(model, action=SpikeAction.skip, **options):
    return step_for(model, guard=Guard(spike_zscore=6.0, spike_window=16, spike_action=action, **options))


def test_spike_is_skipped_and_kept_out_of_the_loss_window(caplog):
    model = model_of()
    step = spike_step(model)
    for number in range(1, 11):
        step(window(seed=number), 1e-3, number)
    before, state = weights(model), states(step)
    assert step(spiked(11), 1e-3, 11).skipped is True
    assert same(before, weights(model))
    assert all(same(a, b) for a, b in zip(state, states(step), strict=True))
    assert len(step.guard.state_dict()["losses"]) == 10
    (record,) = caplog.records
    assert record.getMessage().startswith("step 11: the loss 4938.26 is a spike, with a robust z-score of 2")
    assert "samples 0 to 7" in record.getMessage()
    assert step(window(seed=12), 1e-3, 12).skipped is False


def test_drop_of_the_loss_is_not_a_spike():
    step = spike_step(model_of())
    for number in range(1, 11):
        step(spiked(number), 1e-3, number)
    assert step(window(seed=11), 1e-3, 11).skipped is False


def test_loss_that_stays_high_ends_the_run_after_max_skips():
    step = spike_step(model_of(), max_skips=2)
    for number in range(1, 11):
        step(window(seed=number), 1e-3, number)
    step(spiked(11), 1e-3, 11)
    step(spiked(12), 1e-3, 12)
    with pytest.raises(PersistentSpikeError, match=r"step 13: .* after 2 updates in a row that were skipped"):
        step(spiked(13), 1e-3, 13)


def test_rollback_is_raised_before_the_update():
    model = model_of()
    step = spike_step(model, SpikeAction.rollback)
    for number in range(1, 11):
        step(window(seed=number), 1e-3, number)
    before, guard = weights(model), step.guard.state_dict()
    with pytest.raises(LossSpike, match="step 11: the loss") as raised:
        step(spiked(11), 1e-3, 11)
    assert raised.value.step == 11
    assert raised.value.loss > 1000
    assert raised.value.zscore > 6
    assert same(before, weights(model))
    assert all(p.grad is None for p in model.parameters())
    assert step.guard.state_dict() == guard
    assert step(window(seed=12), 1e-3, 12).skipped is False


def test_nan_is_an_error_with_spike_detection():
    with pytest.raises(NonFiniteError):
        spike_step(model_of())(poisoned(1), 1e-3, 1)


def test_guard_state_survives_json():
    config = Guard(non_finite=NonFinite.skip, max_skips=2, spike_zscore=6.0, spike_window=8)
    first = step_for(model_of(), guard=config)
    for number in range(1, 12):
        first(window(seed=number), 1e-3, number)
    first(poisoned(12), 1e-3, 12)
    state = json.loads(json.dumps(first.guard.state_dict()))
    assert (len(state["losses"]), state["in_a_row"]) == (8, 1)
    second = step_for(model_of(), guard=config)
    second.guard.load_state_dict(state)
    assert second.guard.state_dict() == state
    second(spiked(13), 1e-3, 13)
    with pytest.raises(NonFiniteError, match="after 2 updates in a row"):
        second(poisoned(14), 1e-3, 14)


def test_skips_in_a_row_are_restored_on_a_device():
    step = on_device(model_of(), Guard(non_finite=NonFinite.skip, max_skips=2))
    step.guard.load_state_dict({"losses": [], "in_a_row": 2})
    before = weights(step.model)
    step(poisoned(1), 1e-2, 1)
    with pytest.raises(NonFiniteError, match="after 2 updates in a row"):
        step.guard.check()
    assert same(before, weights(step.model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, []),
        ({"spike_window": 64}, ["guard.spike_window: is 64 but guard.spike_zscore is null"]),
        ({"spike_action": SpikeAction.rollback}, ["guard.spike_action: is rollback but guard.spike_zscore is null"]),
        ({"max_skips": 5}, ["guard.max_skips: is 5 but nothing is skipped"]),
        ({"max_skips": 5, "non_finite": NonFinite.skip}, []),
        ({"max_skips": 5, "spike_window": 64, "spike_zscore": 6.0, "spike_action": SpikeAction.rollback}, []),
    ],
)
def test_guard_settings_without_effect_are_refused(options, message):
    found = [str(violation) for violation in Guard(**options).check()]
    assert len(found) == len(message)
    assert all(line.startswith(start) for line, start in zip(found, message, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "options"), [(adamw, ADAMW), (sgd, SGD), (muon, MUON)], ids=["adamw", "sgd", "muon"])
def test_gpu_skips_steps_without_synchronization(make, options, caplog):
    world = World.single(torch.device("cuda", 0))
    skipping, plain = model_of().cuda(), model_of().cuda()
    ours = step_for(skipping, optimizers=make(model=skipping, **options), guard=SKIP, world=world)
    theirs = step_for(plain, optimizers=make(model=plain, **options), guard=SKIP, world=world)
    averages = WeightAverage(skipping, 0.5), WeightAverage(plain, 0.5)
    for number in range(1, 7):
        bad = number in (1, 4)
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")  # the first step initializes
        result = ours(poisoned(number) if bad else window(seed=number), 1e-2, number)
        averages[0].update(result.skipped)
        if not bad:
            averages[1].update(theirs(window(seed=number), 1e-2, number).skipped)
    torch.cuda.set_sync_debug_mode("default")
    assert caplog.records == []
    ours.guard.check()
    assert [record.getMessage()[:7] for record in caplog.records] == ["step 1:", "step 4:"]
    assert same(weights(skipping), weights(plain))
    assert same(averages[0].average, averages[1].average)
    assert all(same(a, b) for a, b in zip(states(ours), states(theirs), strict=True))
