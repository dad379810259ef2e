import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.data.loader import Loader, held_out_batches
from foundry.data.order import GlobalOrder


class Squares(torch.utils.data.Dataset):
    """Item i is its own index, as a user's plain dataset would have it."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return {"index": torch.tensor(index)}


def order(seed=1, fingerprint="f", n=37):
    return GlobalOrder(num_samples=n, fingerprint=fingerprint, seed=seed)


def loader(**changes):
    arguments = {"dataset": Squares(), "order": order(), "batch_size_at": lambda samples: 8, "per_gpu_batch_size": 8}
    return Loader(**{**arguments, **changes})


def window_indices(loaders):
    """Indices of the next global batch, in the order of their positions."""
    pairs = []
    for one in loaders:
        for microbatch in one.next_window().microbatches:
            pairs += zip(microbatch["position"].tolist(), microbatch["index"].tolist(), strict=True)
    return sorted(pairs)


def test_every_epoch_is_a_permutation_and_they_differ():
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


def test_state_continues_on_another_number_of_ranks():
    alone, resumed = loader(), [loader(dp_rank=r, dp_size=2, per_gpu_batch_size=2) for r in range(2)]
    for _ in range(3):
        alone.next_window()
    for one in resumed:
        one.load_state_dict(alone.state_dict())
    assert window_indices([alone]) == window_indices(resumed)


def test_workers_read_the_same():
    ahead, here = loader(num_workers=2, per_gpu_batch_size=4), loader(per_gpu_batch_size=4)
    for _ in range(6):
        assert window_indices([ahead]) == window_indices([here])


@pytest.mark.parametrize("max_samples", [None, 10, 100])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_held_out_samples_come_once_each_and_padding_is_marked(dp_size, max_samples):
    options = {"per_gpu_batch_size": 4, "dp_size": dp_size, "max_samples": max_samples}
    shares = [list(held_out_batches(Squares(), dp_rank=rank, **options)) for rank in range(dp_size)]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    seen = [i for b in batches for i, p in zip(b["index"].tolist(), b["position"].tolist(), strict=True) if p >= 0]
    assert sorted(seen) == list(range(min(max_samples or 37, 37)))
    assert all(batch["index"].shape == (4,) for batch in batches)
