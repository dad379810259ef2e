import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.config.lengths import resolve_budget, unrounded_batch_sizes
from foundry.config.schemas.hparams import BatchRamp, HParams
from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError

RAMP = ["hparams.batch_ramp.start=4", "hparams.batch_ramp.increment=4", "hparams.batch_ramp.over_samples=900"]


def budget(samples_per_epoch=1000, dp_size=1, **fields):
    return resolve_budget(HParams(**fields), samples_per_epoch=samples_per_epoch, dp_size=dp_size)


def test_shortest_budget_applies_in_whole_steps():
    words = {"global_batch_size": 32, "train_samples": 1000, "epochs": 2.0, "max_steps": 40}
    assert (budget(**words).total_steps, budget(**words).total_samples) == (31, 992)
    assert budget(**{**words, "max_steps": 7}).total_samples == 224
    assert budget(**{**words, "epochs": 0.5}).total_samples == 480


def test_fractional_epochs_are_exact_in_samples():
    assert int(0.29 * 100) == 28
    assert budget(global_batch_size=29, epochs=0.29, samples_per_epoch=100).total_steps == 1


def test_budget_counts_samples_of_the_batch_ramp():
    ramp = BatchRamp(start=8, increment=8, over_samples="160")
    ramped = budget(global_batch_size=16, max_steps=100, batch_ramp=ramp)
    assert (ramped.total_steps, ramped.total_samples) == (100, 1440)


def test_budget_below_one_step_is_rejected():
    with pytest.raises(
        ConfigError, match="is 32 but the whole run has 31 samples, less than one optimizer step; lower it"
    ):
        budget(global_batch_size=32, train_samples=31)


@pytest.mark.parametrize("steps", [3, 6, 7, 500])
def test_warmup_and_decay_may_fill_the_whole_run(compose, steps):
    config = to_config(
        compose(f"hparams.max_steps={steps}", "scheduler=wsd", "scheduler.warmup=0.2", "scheduler.decay=0.8")
    )
    whole = resolve_budget(config.hparams, samples_per_epoch=1000, dp_size=1)
    phases = config.scheduler.phases(whole)
    assert phases.warmup == pytest.approx(0.2 * whole.total_samples)
    assert phases.warmup + phases.decay == pytest.approx(phases.horizon, rel=1e-12)
    assert phases.horizon == whole.total_samples == steps * config.hparams.global_batch_size


def test_warmup_and_decay_longer_than_the_run_are_rejected(compose):
    with pytest.raises(ConfigError, match=r"scheduler\.warmup: is 0\.2: a warm-up of 100 steps and"):
        compose("hparams.max_steps=500", "scheduler=wsd", "scheduler.warmup=0.2", "scheduler.decay=401")


def test_ramp_must_end_within_the_run_or_the_horizon(compose):
    with pytest.raises(ConfigError, match=r"hparams\.batch_ramp: reaches its last size, 8, after 900 samples"):
        compose("hparams.max_steps=100", *RAMP)
    assert compose("hparams.max_steps=100", *RAMP, "scheduler.horizon=500").hparams.max_steps == 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hparams.global_batch_size=0"], r"^hparams\.global_batch_size: is 0 but must be at least 1$"),
        (["hparams.global_batch_size=3", "hparams.allow_rounding=true"], r"^hparams\.global_batch_size: has 3, below"),
    ],
)
def test_empty_batches_are_rejected(compose, overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(*overrides)


@given(start=st.integers(1, 40), increment=st.integers(1, 40), count=st.integers(1, 8), every=st.integers(1, 50))
@settings(max_examples=examples(200))
def test_ramp_grows_after_each_every_samples(start, increment, count, every):
    final = start + increment * count
    ramp = BatchRamp(start=start, increment=increment, every_samples=str(every))
    sizes = unrounded_batch_sizes(HParams(global_batch_size=final, batch_ramp=ramp), tokens_per_sample=None)
    by_hand, size, since = [], start, 0
    for _ in range(every * (count + 2)):
        by_hand.append(size)
        since += 1
        if since == every:
            size, since = min(size + increment, final), 0
    assert [sizes.at(samples) for samples in range(len(by_hand))] == by_hand
