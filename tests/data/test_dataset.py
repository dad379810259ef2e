"""Datasets without foundry's optional methods, and wrappers, which forward every method of the inner dataset."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import foundry
from foundry.core.errors import ConfigError
from foundry.data.dataset import BatchDataset, WrappedDataset, as_dataset
from foundry.data.loader import Loader, held_out_batches
from foundry.data.mixture import Mixture
from foundry.data.splits import DataSplits
from foundry.engine.columns import WithColumns

SIZE = 12


class Plain:
    """A dataset whose sample i is i."""

    colour = "green"

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"value": torch.tensor(float(index))}


class Augmented(Plain):
    """A dataset whose `batch_at` adds 1000 times the position to each sample."""

    def batch_at(self, indices, positions):
        return {"value": torch.tensor([index + 1000.0 * p for index, p in zip(indices, positions, strict=True)])}


class Derived(foundry.Dataset):
    __len__, __getitem__ = Plain.__len__, Plain.__getitem__


class DerivedAugmented(Derived):
    batch_at = Augmented.batch_at


class Ragged(Plain):
    """A dataset whose sample i has i + 1 tokens, counted by `lengths_of`."""

    longest = SIZE - 1

    def lengths_of(self, indices):
        return np.array([index + 1 for index in indices])

    def packed(self, packs):
        return {"documents": torch.tensor(packs)}


class Same(WrappedDataset):
    """A wrapper without changes."""


def splits(dataset, **changes):
    return DataSplits(**{"train": dataset, "validation": dataset, "fingerprint": "f"} | changes)


def read(data, num_workers=0):
    """Return the microbatches of the first two windows."""
    loader = Loader(
        dataset=data.train,
        order=data.order(1),
        batch_size_at=lambda samples: 8,
        per_gpu_batch_size=4,
        num_workers=num_workers,
    )
    return [batch for _ in range(2) for batch in loader.next_window().microbatches]


def evaluate(dataset):
    options = {"per_gpu_batch_size": 4, "dp_rank": 0, "dp_size": 1, "max_samples": None}
    return torch.cat([batch["value"] for batch in held_out_batches(dataset, **options)]).tolist()


@pytest.mark.parametrize("mixture", [None, Mixture(sizes=(4, 8), weights=(1.0, 3.0))])
@pytest.mark.parametrize("kind", [Augmented, DerivedAugmented])
def test_batch_at_is_kept_by_columns_and_mixtures_and_unused_in_evaluation(kind, mixture):
    data = splits(kind(), mixture=mixture)
    data = replace(data, train=WithColumns(Same(data.train), {"column": -torch.arange(float(SIZE))}))
    indices = data.order(1).indices(range(16)).tolist()
    batches = read(data)
    positions = [p for batch in batches for p in batch["position"].tolist()]
    assert positions == list(range(16))
    assert torch.cat([b["value"] for b in batches]).tolist() == [i + 1000.0 * p for p, i in enumerate(indices)]
    assert torch.cat([b["column"] for b in batches]).tolist() == [-float(i) for i in indices]
    assert evaluate(data.train) == evaluate(data.validation) == [float(i) for i in range(SIZE)]


def test_wrapped_dataset_forwards_every_dataset_method():
    methods = {name for name in vars(foundry.Dataset) if not name.startswith("_")} | {"__len__", "__getitem__"}
    assert methods == {name for name in vars(WrappedDataset) if name in methods}
    assert "batch_at" in methods
    wrapped, inner = Same(as_dataset(Ragged())), Ragged()
    assert (len(wrapped), wrapped.longest, wrapped.num_tokens([0, 4])) == (SIZE, inner.longest, 6)
    assert wrapped.lengths_of([3]).tolist() == inner.lengths_of([3]).tolist()
    assert torch.equal(wrapped.packed([[0, 1]])["documents"], inner.packed([[0, 1]])["documents"])


@pytest.mark.parametrize("kind", [Plain, Derived])
def test_dataset_with_two_methods_gets_defaults_for_the_others(kind):
    dataset = as_dataset(kind())
    assert dataset.batch([3, 1])["value"].tolist() == dataset.batch_at([3, 1], [0, 1])["value"].tolist() == [3, 1]
    assert (dataset.longest, dataset.num_tokens([0]), dataset.lengths_of([0])) == (0, None, None)


def test_list_of_samples_is_accepted_as_a_dataset():
    data = splits([{"value": torch.tensor(7.0)}, {"value": torch.tensor(8.0)}])
    assert evaluate(data.validation) == [7, 8, 7, 7]  # The last two samples pad the microbatch.


def test_batch_dataset_derives_single_samples():
    class Doubles(BatchDataset):
        __len__ = Plain.__len__

        def batch(self, indices):
            return {"value": 2 * torch.tensor(indices)}

    assert Doubles()[3]["value"].shape == ()
    assert Doubles()[3]["value"] == 6


def test_wrapped_user_dataset_keeps_its_methods_and_attributes():
    own = Ragged()
    dataset = splits(own).train
    assert (dataset.colour, dataset.longest, dataset.num_tokens([0, 1])) == ("green", SIZE - 1, 3)
    again = pickle.loads(pickle.dumps(dataset))
    assert (again.colour, again.lengths_of([4]).tolist(), len(again.batch([1, 2])["value"])) == ("green", [5], 2)
    with pytest.raises(AttributeError, match="'Ragged' object has no attribute 'size'"):
        _ = dataset.size


def test_splits_keep_their_dataset_and_are_immutable():
    dataset = Derived()
    data = splits(dataset)
    assert replace(data, fingerprint="g").train is data.train is dataset
    with pytest.raises(TypeError, match="train"):
        DataSplits(validation=dataset, fingerprint="f")
    with pytest.raises(AttributeError):
        data.train = []


def test_workers_read_the_same_augmented_batches():
    data = splits(Augmented())
    there, here = read(data, num_workers=1), read(data)
    assert [batch["value"].tolist() for batch in there] == [batch["value"].tolist() for batch in here]


def test_packing_refusal_names_the_innermost_dataset_class():
    for dataset in (Plain(), Same(as_dataset(Plain())), WithColumns(as_dataset(Plain()), {})):
        data = splits(dataset)
        options = {"order": data.order(1), "batch_size_at": lambda samples: 8, "per_gpu_batch_size": 4}
        with pytest.raises(ConfigError, match=r"data\.packing: is true but Plain has no lengths_of\(\)"):
            Loader(dataset=data.train, pack_tokens=32, **options)
