"""The momentum of Muon rises with the samples consumed, from `momentum_warmup_start` to `momentum`."""

import json
from dataclasses import replace

import pytest
import torch
from support.composition import configure
from torch import nn

from foundry.config.lengths import check_lengths, resolve_budget
from foundry.config.schemas.checkpoint import SchedulerOnResume
from foundry.config.schemas.scheduler import EvaluateAt
from foundry.core.errors import ConfigError
from foundry.core.protocols import scheduled_momentum
from foundry.optim.muon import Muon
from foundry.optim.schedule_state import reconcile
from foundry.optim.schedules import Constant, MomentumWarmup, from_state
from foundry.parts import optimization
from foundry.parts.optimization import build_schedule
from foundry.training.step import set_schedule

WARMUP = MomentumWarmup(start=0.85, end=0.95, samples=40.0)
MUON = ["optimizer=muon", "optimizer.momentum_warmup_start=0.85"]
# Sizes of the steps: 8 for the first 20, then 16.
RAMP = [
    "hparams.batch_ramp={start: 8, increment: 8, over_samples: 160}",
    "hparams.global_batch_size=16",
    "hparams.per_gpu_batch_size=4",
    "hparams.max_steps=100",
    "scheduler.warmup=10",
]


def built(*overrides, dp_size=1, tokens=None):
    config = configure(*MUON, *RAMP, *overrides)
    budget = resolve_budget(config.hparams, samples_per_epoch=100, dp_size=dp_size, tokens_per_sample=tokens)
    assert not list(check_lengths(config, budget))
    return build_schedule(config, budget), budget


def test_momentum_rises_linearly_and_stays_exactly_at_its_end():
    assert WARMUP.at(0) == 0.85
    assert [WARMUP.at(n) for n in (10, 20, 30)] == pytest.approx([0.875, 0.9, 0.925], rel=1e-15)
    assert [WARMUP.at(n) for n in (40, 41, 10**9)] == [0.95] * 3


@pytest.mark.parametrize(("at", "point"), [(EvaluateAt.end, 20), (EvaluateAt.start, 10)])
def test_momentum_is_read_at_the_point_of_the_learning_rate(at, point):
    schedule = Constant(max_lr=1.0, warmup=40.0, horizon=100.0, evaluate_at=at, momentum_warmup=WARMUP)
    assert schedule.lr(10, 20) == point / 40
    assert schedule.momentum(10, 20) == scheduled_momentum(schedule, 10, 20) == WARMUP.at(point)
    assert replace(schedule, momentum_warmup=None).momentum(10, 20) is None


def test_schedule_without_momentum_leaves_it_to_the_optimizer():
    class Halving:
        def lr(self, samples_before, samples_after):
            return 0.5**samples_after

    assert scheduled_momentum(Halving(), 0, 1) is None


@pytest.mark.parametrize(
    ("length", "samples"),
    [("40", 480), ("0.25", 360), ("'77 samples'", 77), ("'320 tokens'", 80), ("'0.5 run'", 720)],
)
def test_duration_of_the_momentum_warmup_is_converted_to_samples_of_the_ramp(length, samples):
    for dp_size in (1, 2, 4):
        schedule, budget = built(f"optimizer.momentum_warmup={length}", dp_size=dp_size, tokens=4)
        assert budget.total_samples == 1440
        assert schedule.momentum_warmup == MomentumWarmup(start=0.85, end=0.95, samples=samples)


def test_fraction_refers_to_the_horizon_of_the_scheduler():
    schedule, _ = built("optimizer.momentum_warmup=0.25", "scheduler.horizon='200'")
    assert schedule.momentum_warmup.samples == 0.25 * (1440 + 100 * 16)


def test_momentum_of_each_sample_does_not_depend_on_batches():
    """The same samples have the same momentum with and without a ramp, in whole steps of either."""
    length = "optimizer.momentum_warmup='320 samples'"
    no_ramp = "hparams.batch_ramp={start: null, increment: null, over_samples: null}"
    ramped, constant = (built(length, *words)[0] for words in ([], [no_ramp]))
    for samples in range(0, 480, 16):
        assert ramped.momentum(samples - 8, samples) == constant.momentum(samples - 16, samples)
    assert ramped.momentum(152, 160) == pytest.approx(0.9)


def test_muon_without_a_start_value_has_no_momentum_warmup():
    config = configure("optimizer=muon", "optimizer.momentum_warmup_start=null", *RAMP)
    budget = resolve_budget(config.hparams, samples_per_epoch=100, dp_size=1)
    schedule = build_schedule(config, budget)
    assert schedule.momentum(0, 8) is None
    assert "momentum_warmup" not in schedule.state_dict()


def test_set_schedule_sets_the_momentum_of_groups_that_have_one():
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    options = {"lr": 1.0, "nesterov": True, "ns_steps": 5, "ns_dtype": torch.float32, "weight_decay": 0.0}
    optimizers = [Muon([matrix], momentum=0.95, **options), torch.optim.AdamW([vector])]
    set_schedule(optimizers, 0.5, momentum=0.875)
    assert optimizers[0].param_groups[0]["momentum"] == 0.875
    assert "momentum" not in optimizers[1].param_groups[0]
    set_schedule(optimizers, 0.5)
    assert optimizers[0].param_groups[0]["momentum"] == 0.875


def test_schedule_with_a_momentum_warmup_survives_json():
    schedule, _ = built("optimizer.momentum_warmup=0.25")
    state = json.loads(json.dumps(schedule.state_dict()))
    assert from_state(state) == schedule
    assert from_state(state).momentum(8, 16) == schedule.momentum(8, 16)
    assert reconcile(schedule, state, SchedulerOnResume.match) is schedule


def test_other_momentum_warmup_on_resume_is_refused_by_its_own_keys():
    schedule, _ = built("optimizer.momentum_warmup=0.25")
    other, _ = built("optimizer.momentum_warmup=0.25", "scheduler.horizon='200'")
    with pytest.raises(ConfigError) as raised:
        reconcile(other, schedule.state_dict(), SchedulerOnResume.match)
    keys = [violation.key for violation in raised.value.violations]
    assert keys == ["scheduler.horizon", "optimizer.momentum_warmup"]
    assert "is 760.0 samples but the checkpoint was trained with 360.0 samples" in str(raised.value)
    assert reconcile(other, schedule.state_dict(), SchedulerOnResume.checkpoint) == schedule


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.momentum_warmup_start=0.96"], r"_start: is 0\.96 but must be at most optimizer\.momentum=0\.95"),
        (["optimizer.momentum_warmup_start=1"], r"momentum_warmup_start: is 1 but must be below 1"),
        (["optimizer.momentum_warmup_start=-0.1"], r"momentum_warmup_start: is -0\.1 but must be at least 0"),
        (["optimizer.momentum_warmup='0'"], r"momentum_warmup: is 0 but must be above 0"),
        (["optimizer.momentum_warmup=soon"], r"momentum_warmup: 'soon' is not a duration"),
        (
            ["optimizer.momentum_warmup_start=null", "optimizer.momentum_warmup=20"],
            r"momentum_warmup: is 20 but has no effect without optimizer\.momentum_warmup_start",
        ),
    ],
)
def test_bad_momentum_warmup_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configure(*MUON, *overrides)


def test_run_may_be_shorter_than_the_momentum_warmup():
    schedule, budget = built("optimizer.momentum_warmup=400")
    end = budget.total_samples
    assert 0.85 < schedule.momentum(end - 8, end) < 0.95


def test_momentum_warmup_in_tokens_is_refused_without_tokens():
    config = configure(*MUON, *RAMP, "optimizer.momentum_warmup='80 tokens'")
    budget = resolve_budget(config.hparams, samples_per_epoch=100, dp_size=1)
    (violation,) = check_lengths(config, budget)
    assert str(violation).startswith("optimizer.momentum_warmup: 80 tokens is a length in tokens, but samples of")


def test_momentum_warmup_with_a_schedule_of_another_package_is_refused(monkeypatch):
    class Halving:
        def lr(self, samples_before, samples_after):
            return 0.5**samples_after

        def weight_decay(self, samples_before, samples_after):
            return None

        def state_dict(self):
            return {}

    monkeypatch.setattr(optimization, "build", lambda *_, **__: Halving())
    with pytest.raises(ConfigError, match=r"momentum_warmup_start: is 0\.85 but needs a schedule of foundry, not Halv"):
        built("optimizer.momentum_warmup=0.25")
