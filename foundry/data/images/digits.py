"""Dataset of scikit-learn's handwritten digits: real images, and small enough to train on a laptop."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

from foundry.config.configured import configured_by
from foundry.config.schemas.data import Digits as DigitsSettings
from foundry.core.errors import ConfigError, Violation
from foundry.data.dataset import BatchDataset
from foundry.data.splits import DataSplits


class LabelledImages(BatchDataset):
    """In-memory dataset of images with class labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Initialize the dataset.

        Args:
            images: (n, channels, height, width) float32 in [-1, 1].
            labels: (n,) int64.
        """
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `images`, (batch, channels, height, width) float32, and `labels`, (batch,) int64."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        return {"images": self.images[at], "labels": self.labels[at]}


@configured_by(DigitsSettings)
def digits(settings: DigitsSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of scikit-learn's 1,797 handwritten digits (Alpaydin and Kaynak, 1998).

    The split depends on a hash of each image's index, so runs with different seeds have the same validation images.

    Raises:
        ConfigError: a configured size differs from the size of the images, or a split would lack a class.
    """
    pixels, classes = load_digits(return_X_y=True)
    for key, expected in {"image_size": 8, "num_channels": 1, "num_classes": 10}.items():
        if (value := getattr(settings, key)) != expected:
            raise ConfigError(Violation(f"data.{key}", f"is {value} but the digits have {expected}; leave it out"))
    images = torch.from_numpy((pixels / 8.0 - 1.0).astype(np.float32)).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(classes.astype(np.int64))
    is_held_out = torch.from_numpy(stratified_split(classes, settings.held_out))
    return DataSplits(
        train=LabelledImages(images[~is_held_out], labels[~is_held_out]),
        validation=LabelledImages(images[is_held_out], labels[is_held_out]),
        fingerprint=_fingerprint(images, labels, is_held_out),
        notes={"train_images": int((~is_held_out).sum()), "validation_images": int(is_held_out.sum())},
    )


def stratified_split(
    classes: "np.ndarray[tuple[int], np.dtype[np.int64]]", held_out: float, keys: Sequence[bytes] | None = None
) -> "np.ndarray":
    """Select validation samples: in every class, the fraction `held_out` whose keys have the smallest hashes.

    Args:
        classes: class of each sample, (n,) int64.
        held_out: fraction of every class for validation.
        keys: key of each sample; None for its index.

    Returns:
        (n,) bool, true for validation samples.

    Raises:
        ConfigError: a class would be missing from one of the splits.
    """
    keys = [b"%d" % index for index in range(len(classes))] if keys is None else keys
    hashes = np.array([hashlib.blake2b(key, digest_size=8).hexdigest() for key in keys])
    is_validation = np.zeros(len(classes), dtype=bool)
    for label in np.unique(classes):
        members = np.flatnonzero(classes == label)
        count = round(held_out * len(members))
        if not 0 < count < len(members):
            raise ConfigError(
                Violation(
                    "data.held_out",
                    f"is {held_out:g}, which keeps {count} of the {len(members)} images of class {label}; "
                    "both sides need at least one",
                )
            )
        is_validation[members[np.argsort(hashes[members])[:count]]] = True
    return is_validation


def _fingerprint(images: Tensor, labels: Tensor, is_held_out: Tensor) -> str:
    """Return a hash of all images, labels and the split."""
    digest = hashlib.blake2b(b"digits", digest_size=16)
    for tensor in (images, labels, is_held_out):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
