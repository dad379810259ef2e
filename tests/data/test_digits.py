"""The digits of scikit-learn as training and validation images."""

import numpy as np
import pytest
import torch

from foundry.core.errors import ConfigError
from foundry.data.images.digits import digits, stratified_split


@pytest.fixture(scope="module")
def splits():
    return digits(seed=1, held_out=0.1)


def test_images_are_float32_between_minus_one_and_one(splits):
    images, labels = splits.train.images, splits.train.labels
    assert images.shape == (len(splits.train), 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (images.min(), images.max()) == (-1, 1)
    assert splits.tokens_per_sample is None


def test_digits_splits_partition_the_whole_dataset(splits):
    from sklearn.datasets import load_digits

    everything = torch.cat([splits.train.images, splits.validation.images]).flatten(1)
    original = torch.from_numpy(load_digits().data).float() / 8 - 1
    assert len(everything) == len(original) == 1797
    assert sorted(map(tuple, everything.tolist())) == sorted(map(tuple, original.tolist()))


def test_digits_validation_split_is_stratified_by_class(splits):
    held_out = splits.validation.labels.bincount(minlength=10)
    share = held_out / (held_out + splits.train.labels.bincount(minlength=10))
    assert torch.all((share - 0.1).abs() < 0.005)


def test_digits_split_depends_on_held_out_and_not_on_the_seed(splits):
    other = digits(seed=2, held_out=0.1)
    assert torch.equal(other.validation.images, splits.validation.images)
    assert other.fingerprint == splits.fingerprint
    assert digits(seed=1, held_out=0.2).fingerprint != splits.fingerprint


def test_larger_held_out_share_contains_the_smaller_one():
    classes = np.repeat(np.arange(3), 50)
    small, large = stratified_split(classes, 0.1), stratified_split(classes, 0.3)
    assert (small.sum(), large.sum()) == (15, 45)
    assert not np.any(small & ~large)


def test_digits_batch_equals_its_items(splits):
    batch = splits.train.batch([5, 3, 5])
    for row, index in enumerate([5, 3, 5]):
        assert torch.equal(batch["images"][row], splits.train[index]["images"])
        assert torch.equal(batch["labels"][row], splits.train[index]["labels"])


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"held_out": 0.001}, "data.held_out"), ({"held_out": 0.1, "image_size": 16}, "data.image_size")],
)
def test_invalid_digits_settings_name_their_config_key(settings, key):
    with pytest.raises(ConfigError, match=key):
        digits(seed=1, **settings)
