"""Properties of all learning-rate and batch size schedules; ten thousand random runs if `long` tests are selected."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.config.schemas.scheduler import DecayStyle, EvaluateAt, IncrementStyle
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.optim.schedules import WSD, Constant, Cosine, InverseSquareRoot, Linear, WeightDecay

ROUNDING = 4 * 2.0**-52


def runs(number):
    return settings(max_examples=examples(number), deadline=None, derandomize=True, database=None)


@st.composite
def batch_sizes(draw):
    kind = draw(st.sampled_from(["constant", "ramp", "schedule"]))
    if kind == "constant":
        return BatchSizes.constant(draw(st.integers(1, 64)))
    if kind == "ramp":
        start, increment, count = (draw(st.integers(1, 8)) for _ in range(3))
        over = draw(st.integers(1, 400))
        return BatchSizes.ramp(start=start, increment=increment, over_samples=over, final=start + increment * count)
    later = draw(st.lists(st.integers(1, 500), unique=True, max_size=5))
    return BatchSizes.parse(" ".join(f"{at}:{draw(st.integers(1, 64))}" for at in [0, *later]))


@st.composite
def budgets(draw):
    sizes, steps = draw(batch_sizes()), draw(st.integers(2, 40))
    return Budget(total_samples=sizes.samples_after(steps), batch_sizes=sizes, samples_per_epoch=100)


@st.composite
def lengths(draw, budget):
    """Draw a length within the run, as a user writes it."""
    unit = draw(st.sampled_from(["steps", "fraction", "samples"]))
    if unit == "steps":
        return str(draw(st.integers(1, budget.total_steps - 1)))
    if unit == "samples":
        return f"{draw(st.integers(1, budget.total_samples))} samples"
    return f"{draw(st.floats(1e-3, 1)):.6f}"


@st.composite
def schedules(draw, curves):
    """Draw a budget and a schedule that fits into it, whose horizon is the length of the run."""
    budget, curve = draw(budgets()), draw(st.sampled_from(curves))
    peak = draw(st.floats(1e-6, 1.0))
    horizon = draw(st.sampled_from(["1.0", f"{budget.total_steps}", f"{budget.total_samples} samples"]))
    shape = {}
    if curve is WSD:
        shape = {"decay": draw(lengths(budget)), "decay_style": draw(st.sampled_from(list(DecayStyle)))}
    one = curve.from_durations(
        budget=budget,
        max_lr=peak,
        min_lr=draw(st.floats(0, 1)) * peak,
        force_min_lr=draw(st.sampled_from([0.0, 0.3])) * peak,
        warmup=draw(st.just("0") | lengths(budget)),
        warmup_init=draw(st.floats(0, 1)) * peak,
        horizon=horizon,
        evaluate_at=draw(st.sampled_from(list(EvaluateAt))),
        **shape,
    )
    assume(one.warmup + getattr(one, "decay", 1.0) <= one.horizon)
    return budget, one


def updates(budget):
    sizes = budget.batch_sizes
    return list(pairwise(int(sizes.samples_after(step)) for step in range(budget.total_steps + 1)))


@runs(2000)
@given(schedules([Constant, Linear, Cosine, InverseSquareRoot, WSD]))
def test_rates_stay_in_bounds_and_rise_only_during_warmup(drawn):
    budget, one = drawn
    reads = [n if one.evaluate_at is EvaluateAt.start else m for n, m in updates(budget)]
    rates = [one.lr(*update) for update in updates(budget)]
    least = min(one.min_lr, one.warmup_init)
    assert all(least * (1 - ROUNDING) <= rate <= one.max_lr * (1 + ROUNDING) for rate in rates)
    warming = [rate for rate, n in zip(rates, reads, strict=True) if n <= one.warmup]
    assert warming == sorted(warming)
    after = [rate for rate, n in zip(rates, reads, strict=True) if n > one.warmup]
    assert all(b <= a * (1 + ROUNDING) for a, b in pairwise(after))
    assert all(rate >= one.force_min_lr for rate in after)


@runs(1500)
@given(schedules([Linear, Cosine, WSD]))
def test_last_update_uses_exactly_the_floor(drawn):
    budget, one = drawn
    assert one.horizon == budget.total_samples
    assert one.lr_at(budget.total_samples) == max(one.min_lr, one.force_min_lr)
    if one.evaluate_at is EvaluateAt.end:
        assert one.lr(*updates(budget)[-1]) == max(one.min_lr, one.force_min_lr)


@runs(1200)
@given(schedules([Constant, Linear, Cosine, InverseSquareRoot, WSD]))
def test_schedule_phases_are_continuous(drawn):
    _, one = drawn
    ends = [one.warmup] if one.warmup >= 1 else []
    ends += [one.horizon - one.decay] if isinstance(one, WSD) else []
    ends += [one.horizon] if not isinstance(one, InverseSquareRoot) else []
    assume(getattr(one, "decay", 1.0) >= 1)
    # No phase is shorter than a sample, so 1e-9 samples change a linear segment by at most 1e-9 of the peak.
    near = math.sqrt(1e-9) if isinstance(one, WSD) else 1e-8
    for end in ends:
        around = [one.lr_at(end + step) for step in (-1e-9, 0, 1e-9)]
        assert max(around) - min(around) <= 2 * near * one.max_lr


@runs(2300)
@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1e-3, 1e6),
    st.sampled_from([IncrementStyle.linear, IncrementStyle.cosine]),
)
def test_weight_decay_is_monotonic_and_ends_at_exactly_its_end(start, end, horizon, style):
    curve = WeightDecay(start=start, end=end, horizon=horizon, style=style)
    values = [curve.at(horizon * share / 20) for share in range(21)]
    assert (values[0], curve.at(horizon), curve.at(2 * horizon)) == (start, end, end)
    low, high = sorted((start, end))
    assert all(low - ROUNDING <= value <= high + ROUNDING for value in values)
    assert all((b - a) * (end - start) >= 0 or abs(b - a) <= ROUNDING for a, b in pairwise(values))


@runs(1500)
@given(batch_sizes(), st.integers(1, 60), st.data())
def test_batch_size_formulas_agree_with_step_by_step_enumeration(sizes, steps, data):
    edges = [0]
    for _ in range(steps):
        edges.append(edges[-1] + sizes.at(edges[-1]))
    assert [sizes.samples_after(step) for step in range(steps + 1)] == edges
    assert [sizes.steps_at(edge) for edge in edges] == list(range(steps + 1))
    along = [min(stage.first_step, steps) for stage in sizes.stages] + [steps]
    walked = [s.global_batch_size * (b - a) for s, (a, b) in zip(sizes.stages, pairwise(along), strict=True)]
    assert sum(walked) == edges[-1]
    step = data.draw(st.integers(0, steps - 1))
    inside = edges[step] + data.draw(st.integers(0, sizes.at(edges[step]) - 1))
    assert sizes.whole_steps(inside) == step
    assert math.isclose(sizes.samples_after(sizes.steps_at(inside)), inside, rel_tol=1e-12, abs_tol=1e-12)
    last = data.draw(st.integers(0, steps))
    assert sizes.samples_before(edges[steps], last) == edges[steps] - edges[steps - last]
    part = data.draw(st.integers(0, step))
    behind = sizes.steps_at(inside) - part
    assert math.isclose(sizes.samples_before(inside, part), inside - sizes.samples_after(behind), abs_tol=1e-9)


@runs(750)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 10**7), st.data())
def test_batch_size_ramp_matches_the_megatron_formula(start, increment, count, over, data):
    final = start + increment * count
    sizes = BatchSizes.ramp(start=start, increment=increment, over_samples=over, final=final)
    corners = [int(over / count * k) + beside for k in range(count + 1) for beside in (-1, 0, 1)]
    for samples in {0, over, over + 1, data.draw(st.integers(0, 2 * over)), *(c for c in corners if c >= 0)}:
        grown = start + increment * int(samples / (over / count))
        assert sizes.at(samples) == (final if samples > over else grown)


@runs(750)
@given(batch_sizes(), st.integers(1, 16))
def test_rounded_batch_sizes_are_the_largest_multiples(sizes, multiple):
    if min(sizes.sizes) < multiple:
        with pytest.raises(ValueError, match="batch size of 0"):
            sizes.rounded(multiple)
        return
    rounded = sizes.rounded(multiple)
    for samples in range(521):
        assert rounded.at(samples) == sizes.at(samples) // multiple * multiple
