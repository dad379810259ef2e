import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from foundry.config.schemas.evaluation import Evaluation
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget, Duration, EpochInterval, Interval, Unit

BUDGET = Budget(total_samples=1600, batch_sizes=BatchSizes.constant(16), samples_per_epoch=400, tokens_per_sample=256)


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("10", 160),
        ("1", 16),
        ("1.0", 1600),
        ("0.3", 480),
        (".5", 800),
        ("2 epochs", 800),
        ("1 epoch", 400),
        ("0.5 epochs", 200),
        ("50 samples", 50),
        ("1k samples", 1000),
        ("25.6k tokens", 100),
        ("1M tokens", 1e6 / 256),
        ("2 steps", 32),
        ("1k", 16000),
        ("0.25 run", 400),
        ("1 run", 1600),
        ("2.01k", 32160),
        ("1e-05", 0.016),
    ],
)
def test_durations_of_every_unit_convert_to_samples(text, samples):
    assert Duration.parse(text).samples(BUDGET) == samples


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "abc", "10 parsecs", "1e3", "10 k", "nan", "0.5k 3", "1.0001k", "2 run", "1k run"]
)
def test_malformed_durations_are_rejected(text):
    with pytest.raises(ValueError, match=r"is |has "):
        Duration.parse(text)


def test_integer_one_is_a_step_and_float_one_is_the_whole_run():
    assert Duration.parse("1").unit is Unit.steps
    assert Duration.parse("1.0").unit is Unit.fraction
    assert str(Duration.parse("1")) == "1 step"
    assert str(Duration.parse("1.0")) == "1.0 of the run"


@pytest.mark.parametrize("number", [0, 0.5, 1, 2])
@pytest.mark.parametrize("unit", ["step", "epoch", "sample", "token", "run"])
def test_unit_of_a_duration_is_singular_for_one_and_its_text_is_parsed_again(number, unit):
    duration = Duration(float(number), Unit(unit if unit == "run" else f"{unit}s"))
    assert str(duration) == duration.text == f"{number} {unit}{'' if unit == 'run' or number == 1 else 's'}"
    if number <= 1 and (unit != "step" or number != 0.5):
        assert Duration.parse(duration.text) == duration


def test_fraction_without_unit_is_relative_to_the_given_whole():
    assert Duration.parse("0.25").samples(BUDGET, reference=4000) == 1000
    assert Duration.parse("0.25 run").samples(BUDGET, reference=4000) == 400
    assert str(Duration.parse("0.25 run")) == "0.25 run"


def test_duration_in_tokens_requires_tokens():
    budget = Budget(total_samples=10, batch_sizes=BatchSizes.constant(1), samples_per_epoch=10)
    with pytest.raises(ValueError, match="samples of this data have no tokens"):
        Duration.parse("5 tokens").samples(budget)


@given(st.integers(0, 10**9), st.sampled_from(["", "k", "M", "B"]))
def test_step_counts_with_suffixes_are_exact(number, suffix):
    scale = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}[suffix]
    assert Duration.parse(f"{number}{suffix}") == Duration(number * scale, Unit.steps)


@given(st.floats(0, 1, allow_nan=False).map(lambda share: f"{share:.6f}"))
def test_fractions_are_not_rounded(text):
    assert Duration.parse(text).samples(BUDGET) == float(text) * 1600


def test_intervals_in_steps_and_samples_are_due_at_their_multiples():
    steps, share = Interval.parse("10", BUDGET), Interval.parse("0.25", BUDGET)
    assert [step for step in range(1, 101) if steps.due(step, 16 * (step - 1), 16 * step)] == [*range(10, 101, 10)]
    assert [step for step in range(1, 101) if share.due(step, 16 * (step - 1), 16 * step)] == [25, 50, 75, 100]
    odd = Interval.parse("50 samples", BUDGET)
    assert [step for step in range(1, 14) if odd.due(step, 16 * (step - 1), 16 * step)] == [4, 7, 10, 13]


@pytest.mark.parametrize("percent", range(1, 101))
def test_fractional_interval_is_due_at_the_exact_step(percent):
    budget = Budget(total_samples=100, batch_sizes=BatchSizes.constant(1), samples_per_epoch=400)
    share = Interval.parse(f"{percent / 100} run", budget)
    assert [step for step in range(1, 101) if share.due(step, step - 1, step)] == [*range(percent, 101, percent)]


@pytest.mark.parametrize(
    ("text", "message"), [("0", "is 0 but must"), ("0.0", "is 0.0 but must"), ("101", "101 steps, but .* 100")]
)
def test_intervals_of_zero_or_beyond_the_run_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        Interval.parse(text, BUDGET)


def due(value, budget):
    """Return the steps of a run after which the evaluation interval `value` is due."""
    interval, sizes = Evaluation(interval=value).interval_in(budget), budget.batch_sizes
    edges = [int(sizes.samples_after(step)) for step in range(budget.total_steps + 1)]
    return [step for step in range(1, len(edges)) if interval.due(step, edges[step - 1], edges[step])]


def test_interval_units_count_run_steps_or_steps_of_each_epoch():
    # BUDGET has 25 batches in each of four epochs.
    assert due("10 epoch_steps", BUDGET) == [10, 20, 35, 45, 60, 70, 85, 95]
    assert due(10, BUDGET) == due("10", BUDGET) == due("10 steps", BUDGET) == [*range(10, 101, 10)]
    assert due(0.25, BUDGET) == [e + b for e in (0, 25, 50, 75) for b in (6, 12, 18, 24)]
    assert due("0.25 run", BUDGET) == [25, 50, 75, 100]
    assert due(1, BUDGET) == due("1 epoch_step", BUDGET) == [*range(1, 101)]
    assert due(1.0, BUDGET) == due("1 epoch", BUDGET) == due(25, BUDGET) == [25, 50, 75, 100]
    assert due("26 epoch_steps", BUDGET) == due("1k epoch_steps", BUDGET) == [25, 50, 75, 100]
    assert due("1 run", BUDGET) == [100]


def test_batch_belongs_to_the_epoch_where_it_begins():
    budget = Budget(total_samples=40, batch_sizes=BatchSizes.constant(4), samples_per_epoch=10)
    # Batches of the four epochs begin at samples 0 4 8 | 12 16 | 20 24 28 | 32 36.
    assert due(1.0, budget) == [3, 5, 8, 10]
    assert due("2 epoch_steps", budget) == [2, 5, 7, 10]
    assert due(0.4, budget) == [*range(1, 11)]


def test_epoch_intervals_follow_growing_batch_sizes():
    sizes = BatchSizes([(0, 2), (8, 4)])
    budget = Budget(total_samples=24, batch_sizes=sizes, samples_per_epoch=8)
    # Four batches in the first epoch, then two in each epoch.
    assert due(0.5, budget) == [2, 4, 5, 6, 7, 8]
    assert due("3 epoch_steps", budget) == [3, 6, 8]
    assert due(1.0, budget) == [4, 6, 8]


def test_epoch_smaller_than_a_batch_is_due_at_every_step():
    budget = Budget(total_samples=64, batch_sizes=BatchSizes.constant(16), samples_per_epoch=10)
    for value in ("1 epoch_steps", "3 epoch_steps", 0.1, 1.0):
        assert due(value, budget) == [1, 2, 3, 4]


@given(
    size=st.integers(1, 7),
    epoch=st.integers(1, 60),
    steps=st.integers(1, 80),
    every=st.integers(1, 80) | st.floats(0.01, 1),
)
def test_epoch_interval_matches_a_count_by_hand(size, epoch, steps, every):
    sizes = BatchSizes.constant(size)
    budget = Budget(total_samples=size * steps, batch_sizes=sizes, samples_per_epoch=epoch)
    interval = EpochInterval(every=every, batch_sizes=sizes, samples_per_epoch=epoch)
    found = [step for step in range(1, budget.total_steps + 1) if interval.due(step, size * (step - 1), size * step)]
    by_hand, batch, now = [], 0, 0
    counts = {}
    for step in range(10 * (steps + epoch)):
        counts[size * step // epoch] = counts.get(size * step // epoch, 0) + 1
    for step in range(1, steps + 1):
        begins_in = size * (step - 1) // epoch
        batch = batch + 1 if begins_in == now else 1
        now = begins_in
        wanted = every if isinstance(every, int) else int(counts[now] * every)
        if batch % min(counts[now], max(1, wanted)) == 0:
            by_hand.append(step)
    assert found == by_hand


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (101, "is 101 steps, but the run has only 100"),
        ("101", "is 101 steps, but the run has only 100"),
        ("5 epochs", "is 5 epochs, 125 steps, but the run has only 100"),
        (
            "0.25",
            "is the string '0.25', without a unit; write 0.25 without quotes for a fraction of an epoch, or '0.25 run'",
        ),
        (1.5, "is 1.5, a fraction of an epoch, which is at most 1.0; write '1.5 epochs'"),
        ("0 run", "is 0 run but must be above 0"),
    ],
)
def test_invalid_evaluation_intervals_are_rejected(value, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(interval=value).interval_in(BUDGET)


@pytest.mark.parametrize("value", [0.5, 1.0, "11 epoch_steps", "26 epoch_steps"])
def test_run_within_its_first_epoch_may_evaluate_only_at_its_end(value):
    budget = Budget(total_samples=160, batch_sizes=BatchSizes.constant(16), samples_per_epoch=400)
    assert due(0.4, budget) == due("10 epoch_steps", budget) == [10]
    assert due(value, budget) == []


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    steps=st.integers(2, 60),
    interval=st.integers(1, 30).map(str) | st.integers(1, 90).map("{} samples".format),
)
def test_times_before_end_counts_the_due_steps(sizes, steps, interval):
    batch_sizes = BatchSizes((17 * index, size) for index, size in enumerate(sizes))
    total = int(batch_sizes.samples_after(steps))
    budget = Budget(total_samples=total, batch_sizes=batch_sizes, samples_per_epoch=100)
    assume(Duration.parse(interval).samples(budget) <= total)
    before_end = [step for step in due(interval, budget) if step < steps]
    most = Interval.parse(interval, budget).times_before_end(budget)
    assert len(before_end) <= most
    if "samples" not in interval or int(interval.split()[0]) >= max(sizes):
        assert len(before_end) == most


@pytest.mark.parametrize(
    ("value", "unit"), [(1, Unit.steps), (1.0, None), ("1 epoch_step", None), ("1 run", Unit.run), ("x", None)]
)
def test_interval_unit_of_evaluation_intervals(value, unit):
    assert Evaluation(interval=value).interval_unit() is unit
