"""Curves of learning rate and weight decay; tests/parity compares their values with Megatron's."""

import json
import math
from dataclasses import dataclass, replace

import pytest

from foundry.config.schemas import scheduler as schemas
from foundry.config.schemas.scheduler import DecayStyle, EvaluateAt, IncrementStyle
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget, Phases
from foundry.optim.schedules import WSD, Constant, Cosine, InverseSquareRoot, Linear, WeightDecay, from_state

RAMP = BatchSizes.ramp(start=2, increment=2, over_samples=12, final=8)  # sizes of the steps: 2, 2, 4, 6, then 8


def resolve_budget(sizes, steps):
    return Budget(total_samples=sizes.samples_after(steps), batch_sizes=sizes, samples_per_epoch=100)


def build(curve, *, budget=None, **changes):
    arguments = {"max_lr": 1e-3, "warmup": "0.1", "horizon": "1.0", "min_lr": 1e-5}
    if curve is WSD:
        arguments |= {"decay": "0.3", "decay_style": DecayStyle.linear}
    budget = budget or resolve_budget(BatchSizes.constant(10), 100)
    return curve.from_durations(budget=budget, **{**arguments, **changes})


@pytest.mark.parametrize("curve", [Linear, Cosine, WSD])
def test_first_update_has_a_nonzero_rate_and_the_last_reaches_the_floor(curve):
    one = build(curve)
    assert one.lr(0, 10) == pytest.approx(1e-4)
    assert one.lr(990, 1000) == 1e-5
    start = build(curve, evaluate_at=EvaluateAt.start)
    assert start.lr(0, 10) == 0.0
    assert start.lr(990, 1000) > 1e-5


@pytest.mark.parametrize("curve", [Constant, Linear, Cosine, WSD, InverseSquareRoot])
def test_warmup_starts_at_warmup_init(curve):
    one = build(curve, warmup_init=4e-4)
    assert [one.lr_at(n) for n in (0, 50, 100)] == pytest.approx([4e-4, 7e-4, 1e-3])


def test_clamped_warmup_leaves_the_last_step_of_the_horizon():
    assert build(Linear, warmup="200", clamp_warmup=True).lr_at(990) == pytest.approx(1e-3)
    assert build(Linear, warmup="200", clamp_warmup=True).lr_at(495) == pytest.approx(5e-4)
    assert build(Linear, warmup="50", clamp_warmup=True).lr_at(500) == pytest.approx(1e-3)


def test_force_min_lr_and_shorter_horizon_set_the_floor():
    one = build(Cosine, force_min_lr=5e-4, horizon="0.5")
    assert one.lr_at(900) == 5e-4
    assert one.lr_at(10) == pytest.approx(2e-4)  # The warmup of 50 samples is not raised to the floor.
    assert build(Cosine, horizon="0.5").lr_at(500) == 1e-5
    assert build(Cosine, horizon="0.5").lr_at(501) == 1e-5


def test_inverse_square_root_decays_and_drops_past_the_horizon():
    one = build(InverseSquareRoot)
    assert [one.lr_at(n) for n in (50, 100, 400, 900)] == pytest.approx([5e-4, 1e-3, 5e-4, 1e-3 / 3])
    assert (one.lr_at(1000), one.lr_at(1001)) == (pytest.approx(1e-3 / math.sqrt(10)), 1e-5)
    assert build(InverseSquareRoot, min_lr=6e-4).lr_at(400) == 6e-4
    assert [build(InverseSquareRoot, warmup="0").lr_at(n) for n in (0, 1, 4)] == [1e-3, 1e-3, 5e-4]


@pytest.mark.parametrize(
    ("style", "half"),
    [
        (DecayStyle.linear, 0.5),
        (DecayStyle.cosine, 0.5),
        (DecayStyle.exponential, math.sqrt(2) - 1),
        (DecayStyle.minus_sqrt, 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_constant_until_its_decay_which_ends_at_the_horizon(style, half):
    one = build(WSD, min_lr=0.0, decay_style=style)
    assert [one.lr_at(n) for n in (100, 101, 700)] == [1e-3] * 3
    assert one.lr_at(850) == pytest.approx(half * 1e-3)
    assert (one.lr_at(1000), one.lr_at(5000)) == (0.0, 0.0)


def test_fractional_wsd_decay_ends_at_exactly_the_floor():
    one = build(WSD, budget=resolve_budget(BatchSizes.constant(1), 7), min_lr=0.0, warmup="0")
    assert one.horizon - (one.horizon - one.decay) != one.decay
    assert one.lr(6, 7) == 0.0


def test_constant_schedule_stays_at_the_peak():
    one = build(Constant, min_lr=0.0)
    assert (one.lr_at(50), one.lr_at(100), one.lr_at(10**9)) == (pytest.approx(5e-4), 1e-3, 1e-3)


def test_weight_decay_schedule_rises_falls_or_is_unset():
    assert build(Linear).weight_decay(0, 10) is None
    curve = {"start_weight_decay": 0.1, "end_weight_decay": 0.01, "weight_decay_incr_style": IncrementStyle.linear}
    one = build(Linear, **curve)
    assert one.weight_decay(0, 500) == pytest.approx(0.055)
    assert one.weight_decay(990, 1000) == 0.01
    assert replace(one, evaluate_at=EvaluateAt.start).weight_decay(0, 10) == 0.1
    cosine = WeightDecay(start=0.0, end=0.1, horizon=100, style=IncrementStyle.cosine)
    assert [cosine.at(n) for n in (0, 25, 50, 100, 101)] == pytest.approx(
        [0.0, 0.1 * (1 - math.sqrt(0.5)) / 2, 0.05, 0.1, 0.1]
    )
    assert build(Linear, **curve, weight_decay_horizon="50 samples").weight_decay(40, 50) == 0.01


def test_contradictory_weight_decay_is_refused():
    with pytest.raises(ValueError, match=r"cannot change from 0\.1 to 0\.2"):
        WeightDecay(start=0.1, end=0.2, horizon=10, style=IncrementStyle.constant)
    with pytest.raises(ValueError, match="within 0 samples"):
        WeightDecay(start=0.1, end=0.2, horizon=0, style=IncrementStyle.linear)


@pytest.mark.parametrize("curve", [Constant, Linear, Cosine, InverseSquareRoot, WSD])
@pytest.mark.parametrize("style", [None, IncrementStyle.cosine])
def test_schedule_state_survives_json(curve, style):
    decays = {} if style is None else {"start_weight_decay": 0.1, "end_weight_decay": 0.2}
    one = build(curve, **decays, weight_decay_incr_style=style, warmup="0.013", evaluate_at=EvaluateAt.start)
    state = json.loads(json.dumps(one.state_dict()))
    assert state["style"] == curve.__name__
    assert from_state(state) == one
    assert from_state(state).lr_at(777) == one.lr_at(777)


@pytest.mark.parametrize("curve", [Cosine, WSD])
def test_settings_object_and_keywords_give_the_same_schedule(curve):
    values = {"warmup": "5", "min_lr": 1e-5, "start_weight_decay": 0.1, "end_weight_decay": 0.1}
    values |= {"decay": "0.2"} if curve is WSD else {}
    given = {"max_lr": 1e-3, "budget": resolve_budget(BatchSizes.constant(10), 100)}
    settings = getattr(schemas, curve.__name__)(**values)
    one = curve.from_durations(settings, **given)
    assert one == curve.from_durations(**values, **given)
    assert (one.warmup, one.min_lr, one.weight_decay(0, 10)) == (50.0, 1e-5, 0.1)


def test_schedule_subclass_accepts_its_own_fields():
    @dataclass(frozen=True, kw_only=True)
    class Halved(Cosine):
        share: float

    given = {"max_lr": 1e-3, "budget": resolve_budget(BatchSizes.constant(10), 100), "horizon": "50"}
    one = Halved.from_durations(share=0.5, **given)
    assert (one.share, one.horizon) == (0.5, 500.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shape'"):
        Halved.from_durations(share=0.5, shape=1, **given)


def test_schedule_state_with_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="'Polynomial' is not a known schedule; available: Constant, Linear"):
        from_state({"style": "Polynomial"})


def resolve(budget, **texts):
    return Phases.resolve(
        budget, **{"warmup": "0.1", "horizon": "1.0", "decay": None, "weight_decay_horizon": None, **texts}
    )


def test_fractions_refer_to_the_horizon_and_weight_decay_to_the_longer_end():
    budget = resolve_budget(BatchSizes.constant(10), 100)
    shorter = resolve(budget, horizon="0.5", decay="0.2")
    assert (shorter.warmup, shorter.horizon, shorter.decay, shorter.weight_decay_horizon) == (50, 500, 100, 1000)
    longer = resolve(budget, horizon="2 epochs", warmup="20 samples")
    assert (longer.warmup, longer.horizon, longer.weight_decay_horizon) == (20, 200, 1000)
    cut_short = resolve(budget, horizon="300", decay="7 samples")
    assert (cut_short.warmup, cut_short.horizon, cut_short.decay) == (300, 3000, 7)
    assert cut_short.weight_decay_horizon == 3000
    assert resolve(budget, weight_decay_horizon="30 samples").weight_decay_horizon == 30


def test_lengths_in_steps_are_converted_to_samples_of_the_ramp():
    budget = resolve_budget(RAMP, 10)
    assert [RAMP.samples_after(n) for n in range(9)] == [0, 2, 4, 8, 14, 22, 30, 38, 46]
    phases = resolve(budget, warmup="3", decay="6")
    assert (budget.total_samples, phases.warmup, phases.horizon) == (62, 8, 62)
    assert phases.decay == 62 - 14  # The last six of ten steps.
