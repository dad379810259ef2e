"""The numbers of plan.json match values computed by hand."""

import pytest
from torch import nn

from foundry.config.lengths import resolve_budget
from foundry.data.splits import DataSplits
from foundry.parts.optimization import build_schedule
from foundry.planning.derive import build_plan

RAMPED = [
    "hparams.batch_ramp={start: 8, increment: 8, over_samples: 160}",
    "hparams.global_batch_size=16",
    "hparams.per_gpu_batch_size=4",
    "hparams.max_steps=100",
    "scheduler=wsd",
    "scheduler.warmup=10",
    "scheduler.decay=0.25",
]


def planned(config, *, samples_per_epoch=1000, tokens=None):
    budget = resolve_budget(config.hparams, samples_per_epoch=samples_per_epoch, dp_size=2, tokens_per_sample=tokens)
    data = DataSplits(train=[], validation=[], fingerprint="", tokens_per_sample=tokens)
    schedule, model = build_schedule(config, budget), nn.Linear(3, 2)
    return build_plan(config, budget, data, schedule, model, world_size=2, strategy="ddp", device="cpu")


def test_plan_of_a_ramped_run_has_stages_phases_and_durations(configure):
    # 20 steps of 8 samples, then 80 of 16.
    plan = planned(configure(*RAMPED, "distributed=ddp", "distributed.nproc_per_node=2", "evaluation.interval=0.5"))
    assert (plan["total_steps"], plan["total_samples"], plan["total_epochs"]) == (100, 1440, 1.44)
    assert (plan["accum_freq"], plan["steps_per_epoch"], plan["tokens_per_step"]) == (2, 62.5, None)
    assert plan["batch_stages"] == [
        {"first_step": 1, "first_sample": 0, "global_batch_size": 8, "accum_freq": 1},
        {"first_step": 21, "first_sample": 160, "global_batch_size": 16, "accum_freq": 2},
    ]
    assert (plan["lr_warmup_steps"], plan["lr_warmup_samples"]) == (10, 80)
    assert (plan["wsd_decay_steps"], plan["wsd_decay_samples"]) == (22.5, 360)
    assert plan["durations"] == {
        "scheduler.warmup": "10 = 10 steps = 80 samples",
        "scheduler.horizon": "1.0 = 100 steps = 1440 samples",
        "scheduler.decay": "0.25 = 22.5 steps = 360 samples",
        "optimizer.momentum_warmup": "300 = 300 steps = 4640 samples",
        "evaluation.interval": "0.5 = every 36 steps of an epoch",
    }
    assert [(phase["name"], phase["first_step"]) for phase in plan["phases"]] == [
        ("warmup", 1),
        ("stable", 11),
        ("decay", 78),
    ]
    assert plan["parameters"] == 8


@pytest.mark.parametrize(
    ("interval", "meaning"),
    [
        ("30", "30 = 30 steps = 240 samples"),
        ("'30 epoch_steps'", "30 epoch_steps = every 30 steps of an epoch"),
        (
            "'200 epoch_steps'",
            "200 epoch_steps = every 125 steps of an epoch (all of them); the run has 100: only at the end",
        ),
        ("1.0", "1.0 = every 125 steps of an epoch; the run has 100: only at the end"),
    ],
)
def test_plan_describes_evaluation_intervals(interval, meaning, configure):
    words = ["hparams.max_steps=100", "hparams.global_batch_size=8", "hparams.per_gpu_batch_size=4"]
    plan = planned(configure(*words, f"evaluation.interval={interval}"))
    assert plan["durations"]["evaluation.interval"] == meaning


def test_plan_resolves_fractions_of_the_horizon_and_counts_tokens(configure):
    config = configure(
        "hparams.max_steps=50",
        "hparams.global_batch_size=4",
        "scheduler.horizon='3200 tokens'",
        "scheduler.warmup=0.5",
        "scheduler.start_weight_decay=0.1",
        "scheduler.end_weight_decay=0",
        "scheduler.weight_decay_incr_style=linear",
        "scheduler.weight_decay_horizon='0.1'",
        "evaluation.interval='0.5 epochs'",
        "data.seq_len=8",
    )
    plan = planned(config, samples_per_epoch=100, tokens=8)
    assert (plan["tokens_per_step"], plan["total_tokens"]) == (32, 1600)
    assert plan["durations"] == {
        "scheduler.warmup": "0.5 = 50 steps = 200 samples",
        "scheduler.horizon": "3200 tokens = 100 steps = 400 samples",
        "scheduler.weight_decay_horizon": "0.1 = 5 steps = 20 samples",
        "optimizer.momentum_warmup": "300 = 300 steps = 1200 samples",
        "evaluation.interval": "0.5 epochs = 12.5 steps = 50 samples",
    }
    assert plan["weight_decay"] == {"first": 0.08, "last": 0.0}
