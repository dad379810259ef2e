"""Parsing of batch sizes. Batch sizes during a run: tests/optim/test_schedule_properties.py and tests/parity."""

import pytest

from foundry.core.batch_sizes import BatchSizes, Stage, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("9_765_625", 9765625),
        ("250B", 250 * 10**9),
        ("1.5M", 1500000),
        ("2m", 2000000),
        ("2.01k", 2010),  # 2.01 * 1000 is 2009.9999999999998
        ("1e6", 1000000),
        ("1e+16", 10**16),
        ("300000.0", 300000),
    ],
)
def test_parse_count_reads_suffixes_and_exponents(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "-3", "1e-3", "3 k", "1e999", "1_000.0005k"])
def test_parse_count_rejects_fractions_and_malformed_text(text):
    with pytest.raises(ValueError, match="is not a whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" ", "has no entry"),
        ("0:16 100", "'100' is not THRESHOLD:SIZE"),
        ("0:0 100:32", "'0:0' has a batch size of 0"),
        ("10:16 100:32", "starts at 10 samples"),
        ("0:16 100:32 0.1k:64", "has two sizes for the threshold of 100 samples; remove one"),
    ],
)
def test_malformed_batch_schedules_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        BatchSizes.parse(text)


def test_batch_schedule_accepts_token_thresholds_in_any_order():
    assert BatchSizes.parse("250B:1536, 0:768", tokens_per_sample=4096).thresholds == [(0, 768), (61035156, 1536)]


@pytest.mark.parametrize("ramp", [(0, 8, 96), (16, 5, 96), (16, 0, 96), (32, 8, 96), (64, 8, 96), (16, 8, 0)])
def test_batch_ramps_that_do_not_grow_are_rejected(ramp):
    start, increment, over = ramp
    with pytest.raises(ValueError, match=r"does not grow|has a length of 0 samples"):
        BatchSizes.ramp(start=start, increment=increment, over_samples=over, final=32)


def test_batch_size_zero_is_rejected():
    with pytest.raises(ValueError, match="has a batch size of 0; it must be at least 1"):
        BatchSizes.constant(0)
    with pytest.raises(ValueError, match="has a batch size of 0; it must be at least 1"):
        BatchSizes.parse("0:4 100:8").rounded(8)


def test_one_step_may_span_several_stages():
    sizes = BatchSizes.parse("0:10 15:20 25:30 28:40")
    assert sizes.stages == (Stage(0, 0, 10), Stage(2, 20, 20), Stage(3, 40, 40))
    assert [sizes.whole_steps(samples) for samples in (19, 20, 39, 40, 80)] == [1, 2, 2, 3, 4]
