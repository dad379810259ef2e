import gc
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.data.dataset import as_dataset
from foundry.data.loader import Loader, held_out_batches
from foundry.data.order import MAX_TABLE_SAMPLES, GlobalOrder, keyed_permutation


class Squares(torch.utils.data.Dataset):
    """A plain user dataset whose item i is its index."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return {"index": torch.tensor(index)}


def order(seed=1, fingerprint="f", n=37):
    return GlobalOrder(num_samples=n, fingerprint=fingerprint, seed=seed)


def loader(**changes):
    arguments = {
        "dataset": as_dataset(Squares()),
        "order": order(),
        "batch_size_at": lambda samples: 8,
        "per_gpu_batch_size": 8,
    }
    return Loader(**{**arguments, **changes})


def window_indices(loaders):
    """Return the (position, index) pairs of the next global batch, ordered by position."""
    pairs = []
    for one in loaders:
        for microbatch in one.next_window().microbatches:
            pairs += zip(microbatch["position"].tolist(), microbatch["index"].tolist(), strict=True)
    return sorted(pairs)


def test_every_epoch_is_a_different_permutation():
    one = order()
    first, second = one.indices(range(37)), one.indices(range(37, 74))
    assert sorted(first) == sorted(second) == list(range(37))
    assert list(first) != list(second)
    across = list(one.indices(range(30, 80)))
    assert across == [*first[30:], *second, *one.indices(range(74, 80))]


@pytest.mark.parametrize("change", [{"seed": 2}, {"fingerprint": "g"}])
def test_seed_and_fingerprint_change_the_order(change):
    assert list(order().indices(range(37))) != list(order(**change).indices(range(37)))


@settings(deadline=None, max_examples=50)
@given(ranks=st.sampled_from([1, 2, 4]), per_gpu=st.sampled_from([1, 2]), windows=st.integers(1, 7))
def test_ranks_and_microbatches_do_not_change_the_global_batches(ranks, per_gpu, windows):
    alone = loader()
    together = [loader(dp_rank=rank, dp_size=ranks, per_gpu_batch_size=per_gpu) for rank in range(ranks)]
    for _ in range(windows):
        assert window_indices([alone]) == window_indices(together)


def test_loader_state_resumes_on_another_number_of_ranks():
    alone, resumed = loader(), [loader(dp_rank=r, dp_size=2, per_gpu_batch_size=2) for r in range(2)]
    for _ in range(3):
        alone.next_window()
    for one in resumed:
        one.load_state_dict(alone.state_dict())
    assert window_indices([alone]) == window_indices(resumed)


def test_workers_read_the_same_windows():
    ahead, here = loader(num_workers=2, per_gpu_batch_size=4), loader(per_gpu_batch_size=4)
    for _ in range(6):
        assert window_indices([ahead]) == window_indices([here])


def test_rewind_stops_worker_processes_without_garbage_collection():
    one, others = loader(num_workers=2), multiprocessing.active_children()
    gc.disable()
    try:
        one.next_window()
        reading = [process for process in multiprocessing.active_children() if process not in others]
        one.rewind(0)
        assert len(reading) == 2
        assert not any(process.is_alive() for process in reading)
    finally:
        gc.enable()


@pytest.mark.parametrize("max_samples", [None, 10, 100])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_validation_samples_are_read_once_and_padding_is_marked(dp_size, max_samples):
    options = {"per_gpu_batch_size": 4, "dp_size": dp_size, "max_samples": max_samples}
    shares = [list(held_out_batches(as_dataset(Squares()), dp_rank=rank, **options)) for rank in range(dp_size)]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    seen = [i for b in batches for i, p in zip(b["index"].tolist(), b["position"].tolist(), strict=True) if p >= 0]
    assert sorted(seen) == list(range(min(max_samples or 37, 37)))
    assert all(batch["index"].shape == (4,) for batch in batches)


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 5000), key=st.binary(min_size=64, max_size=64))
def test_keyed_permutation_contains_every_item_once(count, key):
    found = keyed_permutation(np.arange(count), num_items=count, key=key)
    assert sorted(found.tolist()) == list(range(count))


def test_large_dataset_order_is_keyed_and_keeps_its_pinned_values():
    large = order(n=MAX_TABLE_SAMPLES + 1)
    assert large.is_keyed
    assert not order(n=MAX_TABLE_SAMPLES).is_keyed
    whole = large.indices(range(50_000, 60_000))
    assert whole[:3].tolist() == [4978593, 14843562, 14207906]
    assert [int(large.indices(range(p, p + 1))[0]) for p in range(50_000, 50_010)] == whole[:10].tolist()
    across = large.indices(range(MAX_TABLE_SAMPLES - 1, MAX_TABLE_SAMPLES + 3)).tolist()
    following = large.indices(range(MAX_TABLE_SAMPLES + 1, MAX_TABLE_SAMPLES + 3)).tolist()
    assert across[2:] == following != large.indices(range(2)).tolist()
    assert large._permutations == {}


def test_keyed_order_is_uniform_and_epochs_are_uncorrelated():
    large, count = order(n=3 * 2**24), 3 * 2**24
    one, other = (large.indices(range(start, start + 64_000)) for start in (0, count))
    for found in (one, other, other - one):
        per_bin = np.bincount(found % count * 64 // count, minlength=64)
        # Chi-square with 63 degrees of freedom: 99.99 % of the values are below 114.
        assert ((per_bin - 1000) ** 2 / 1000).sum() < 114
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.02


def test_checkpoint_without_a_keyed_order_resumes_with_the_table(monkeypatch):
    by_table = loader()
    by_table.next_window()
    earlier = by_table.state_dict()
    assert earlier == {"samples": 8, "skipped": 0}
    monkeypatch.setattr("foundry.data.order.MAX_TABLE_SAMPLES", 36)
    resumed, keyed = loader(order=order()), loader(order=order())
    resumed.load_state_dict(earlier)
    keyed.next_window()
    assert keyed.state_dict() == {"samples": 8, "skipped": 0, "order": "keyed"}
    again = loader(order=order())
    again.load_state_dict(keyed.state_dict())
    in_table = window_indices([by_table])
    assert window_indices([resumed]) == in_table
    assert window_indices([again]) == window_indices([keyed]) != in_table
    assert resumed.state_dict() == by_table.state_dict()
