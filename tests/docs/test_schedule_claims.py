"""Claims in docs/numerics.md on schedules of transformers, torch and VLA Foundry hold for the installed versions."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from foundry.config.schemas.scheduler import DecayStyle, EvaluateAt
from foundry.optim.schedules import WSD, Constant, Cosine, InverseSquareRoot, Linear

WARMUP, TOTAL, DECAY = 10, 100, 30


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates_of(make, updates=TOTAL):
    """Return the rate of every step under a torch scheduler, for an optimizer with a base rate of 1."""
    own = optimizer()
    scheduler, rates = make(own), []
    for _ in range(updates):
        rates.append(own.param_groups[0]["lr"])
        own.step()
        scheduler.step()
    return rates


def ours(kind, *, at=EvaluateAt.start, warmup=WARMUP, **shape):
    schedule = kind(max_lr=1.0, warmup=float(warmup), horizon=float(TOTAL), evaluate_at=at, **shape)
    return [schedule.lr(n, n + 1) for n in range(TOTAL)]


def wsd(style):
    return {"kind": WSD, "decay": float(DECAY), "decay_style": DecayStyle[style]}


HUGGING_FACE = {
    "constant_with_warmup": ({}, {"kind": Constant}),
    "cosine_with_warmup": ({"num_training_steps": TOTAL}, {"kind": Cosine}),
    "linear_with_warmup": ({"num_training_steps": TOTAL}, {"kind": Linear}),
    "inverse_sqrt": ({}, {"kind": InverseSquareRoot}),
    "wsd": ({"num_training_steps": TOTAL, "num_decay_steps": DECAY}, wsd("cosine")),
    "wsd linear": ({"num_training_steps": TOTAL, "num_decay_steps": DECAY, "decay_type": "linear"}, wsd("linear")),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers_schedules_match_ours_at_the_start_of_a_step(name):
    from transformers import optimization

    arguments, own = HUGGING_FACE[name]
    overrides = name.partition(" ")[0].split("_with_")
    make = getattr(optimization, f"get_{overrides[0]}_schedule" + "".join(f"_with_{word}" for word in overrides[1:]))
    theirs = rates_of(lambda held: make(held, num_warmup_steps=WARMUP, **arguments))
    assert theirs[0] == 0.0
    assert max(abs(a - b) for a, b in zip(theirs, ours(**own), strict=True)) < 2.3e-16
    assert ours(**own, at=EvaluateAt.end)[:-1] == ours(**own)[1:]


def test_torch_cosine_matches_ours_within_the_horizon_and_rises_after():
    plain = rates_of(lambda held: CosineAnnealingLR(held, TOTAL), 2 * TOTAL + 1)
    assert plain[:TOTAL] == pytest.approx(ours(Cosine, warmup=0), abs=2.3e-16)
    assert (plain[150], plain[200]) == pytest.approx((0.5, 1.0))
    warmed = rates_of(
        lambda held: SequentialLR(
            held,
            [LinearLR(held, start_factor=1e-8, total_iters=WARMUP), CosineAnnealingLR(held, TOTAL - WARMUP)],
            milestones=[WARMUP],
        )
    )
    assert warmed == pytest.approx(ours(Cosine), abs=1.01e-8)
    with pytest.raises(ValueError, match="greater than 0"):
        LinearLR(optimizer(), start_factor=0.0)


def test_torch_schedule_keeps_a_manual_change_of_the_rate():
    held = optimizer()
    scheduler = CosineAnnealingLR(held, TOTAL)
    for update in range(51):
        if update == 50:
            held.param_groups[0]["lr"] = 0.1
        held.step()
        scheduler.step()
    assert held.param_groups[0]["lr"] == pytest.approx(0.0969, abs=5e-5)
    assert ours(Cosine, warmup=0)[51] == pytest.approx(0.4843, abs=5e-5)


@pytest.mark.parametrize(("own", "start"), [({"kind": Cosine}, WARMUP), (wsd("cosine"), TOTAL - DECAY)])
def test_vla_foundry_schedule_is_end_warmup_and_start_decay(own, start):
    def rate(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 1.0 if step < start else 0.5 * (1 + math.cos(math.pi * (step - start) / (TOTAL - start)))

    theirs = [rate(step) for step in range(TOTAL)]
    assert theirs[:WARMUP] == pytest.approx(ours(**own, at=EvaluateAt.end)[:WARMUP])
    assert theirs[WARMUP:] == pytest.approx(ours(**own)[WARMUP:])
    assert theirs[WARMUP - 1] == theirs[WARMUP] == 1.0
    assert theirs[-1] > 1e-4
