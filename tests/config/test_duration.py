import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundry.config.batch_sizes import BatchSizes
from foundry.config.duration import Budget, Duration, Interval, Unit

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
    ],
)
def test_every_form_in_samples(text, samples):
    assert Duration.parse(text).samples(BUDGET) == samples


@pytest.mark.parametrize("text", ["", "-1", "1.5", "abc", "10 parsecs", "1e3", "10 k", "nan", "0.5k 3", "1.0001k"])
def test_anything_else_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=r"is |has "):
        Duration.parse(text)


def test_one_step_and_the_whole_run_are_told_apart():
    assert Duration.parse("1").unit is Unit.steps
    assert Duration.parse("1.0").unit is Unit.fraction
    assert str(Duration.parse("1")) == "1 steps"
    assert str(Duration.parse("1.0")) == "1.0 of the run"


def test_tokens_of_data_without_tokens():
    budget = Budget(total_samples=10, batch_sizes=BatchSizes.constant(1), samples_per_epoch=10)
    with pytest.raises(ValueError, match="has none"):
        Duration.parse("5 tokens").samples(budget)


@given(st.integers(0, 10**9), st.sampled_from(["", "k", "M", "B"]))
def test_whole_steps_with_any_suffix(number, suffix):
    scale = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}[suffix]
    assert Duration.parse(f"{number}{suffix}") == Duration(number * scale, Unit.steps)


@given(st.floats(0, 1, allow_nan=False).map(lambda share: f"{share:.6f}"))
def test_fractions_are_not_rounded(text):
    assert Duration.parse(text).samples(BUDGET) == float(text) * 1600


def test_an_interval_in_steps_and_one_in_samples():
    steps, share = Interval.parse("10", BUDGET), Interval.parse("0.25", BUDGET)
    assert [step for step in range(1, 101) if steps.due(step, 16 * (step - 1), 16 * step)] == [*range(10, 101, 10)]
    assert [step for step in range(1, 101) if share.due(step, 16 * (step - 1), 16 * step)] == [25, 50, 75, 100]
    odd = Interval.parse("50 samples", BUDGET)
    assert [step for step in range(1, 14) if odd.due(step, 16 * (step - 1), 16 * step)] == [4, 7, 10, 13]


@pytest.mark.parametrize(("text", "said"), [("0", "no length"), ("0.0", "no length"), ("101", "101 steps, but .* 100")])
def test_intervals_that_never_come(text, said):
    with pytest.raises(ValueError, match=said):
        Interval.parse(text, BUDGET)
