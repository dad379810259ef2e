"""Progress counts steps, samples and tokens; state of older manifests, which lack tokens, still loads."""

from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget, Interval
from foundry.core.progress import Progress


def test_progress_counts_consumed_tokens():
    progress = Progress(samples_per_epoch=100, tokens_per_sample=8)
    progress.advance(4, 30)
    progress.advance(4, 17)
    assert (progress.steps, progress.samples, progress.tokens) == (2, 8, 47)
    resumed = Progress(samples_per_epoch=100, tokens_per_sample=8)
    resumed.load_state_dict(progress.state_dict())
    assert resumed == progress


def test_progress_state_without_tokens_assumes_constant_tokens_per_sample():
    for tokens_per_sample, expected in ((8, 96), (None, None)):
        progress = Progress(samples_per_epoch=100, tokens_per_sample=tokens_per_sample)
        progress.load_state_dict({"steps": 3, "samples": 12})
        assert progress.tokens == expected


def test_progress_of_data_without_tokens_has_no_token_count():
    progress = Progress(samples_per_epoch=100, tokens_per_sample=None)
    progress.advance(4, None)
    assert progress.tokens is None


def test_token_interval_is_due_by_consumed_tokens():
    budget = Budget(total_samples=400, batch_sizes=BatchSizes.constant(4), samples_per_epoch=100, tokens_per_sample=8)
    interval = Interval.parse("100 tokens", budget)
    assert interval.due(3, 8, 12, (60, 104))
    assert not interval.due(4, 12, 16, (104, 150)), "32 tokens a step would be due here"
    assert interval.due(4, 12, 16)
