"""Base classes of datasets, and an adapter that gives any map-style dataset the same interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate


class Samples(Protocol):
    """Map-style dataset of dicts of tensors, such as a `torch.utils.data.Dataset` or a list."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return one sample, without a batch dimension."""
        ...


class Dataset(ABC):
    """Map-style dataset. A subclass defines `__len__` and `__getitem__`; the other methods have defaults.

    By default, a dataset does not support packing.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample, without a batch dimension."""

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return samples stacked along a new first dimension; the default reads the samples one by one."""
        return cast(dict[str, Tensor], default_collate([self[index] for index in indices]))

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> dict[str, Tensor]:
        """Return a training batch, possibly with augmentation that depends on the positions in the global order.

        Evaluation and the columns that are precomputed before the first step use `batch` instead. The default returns
        the same as `batch`.

        Args:
            indices: indices into the dataset.
            positions: position of each sample in the global order.
        """
        return self.batch(indices)

    @property
    def longest(self) -> int:
        """Index of the sample that needs the most memory; the default, 0, suits samples of equal size."""
        return 0

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64] | None:
        """Return the length of each sample in tokens, or None if the dataset does not support packing (see `packed`).

        Returns:
            (len(indices),) int64, or (len(indices), parts) if a sample has several parts, as a preference pair has.
        """
        return None

    def num_tokens(self, indices: Sequence[int]) -> int | None:
        """Return the total tokens of these samples, without padding.

        None means that each sample has `DataSplits.tokens_per_sample` tokens.
        """
        lengths = self.lengths_of(indices)
        return None if lengths is None else int(lengths.sum())

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return packed rows, in the format of `Examples.packed`, or of `Pairs.packed` if a sample has two parts."""
        raise NotImplementedError(f"{type(self).__name__} has lengths_of() but not packed()")


class BatchDataset(Dataset):
    """Base class of datasets that read batches; `__getitem__` reads a batch of one."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample, without a batch dimension."""
        return {name: value[0] for name, value in self.batch([index]).items()}

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return samples stacked along a new first dimension."""


class WrappedDataset(Dataset):
    """Wrapper that delegates to another dataset. A subclass overrides the methods that it changes.

    Args:
        dataset: the wrapped dataset.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample, without a batch dimension."""
        return self.dataset[index]

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return samples stacked along a new first dimension."""
        return self.dataset.batch(indices)

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> dict[str, Tensor]:
        """Return a training batch for these positions of the global order."""
        return self.dataset.batch_at(indices, positions)

    @property
    def longest(self) -> int:
        """Index of the sample that needs the most memory."""
        return self.dataset.longest

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64] | None:
        """Return the length of each sample in tokens, or None if the dataset does not support packing."""
        return self.dataset.lengths_of(indices)

    def num_tokens(self, indices: Sequence[int]) -> int | None:
        """Return the total tokens of these samples, or None if each has `DataSplits.tokens_per_sample` tokens."""
        return self.dataset.num_tokens(indices)

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return samples packed into rows."""
        return self.dataset.packed(packs)


class _Adapted(WrappedDataset):
    """Wrapper around samples of any class; methods of `Dataset` that the class lacks get their defaults."""

    dataset: Any

    def __init__(self, samples: Samples) -> None:
        super().__init__(cast(Dataset, samples))
        for name in ("batch", "batch_at", "lengths_of", "num_tokens", "packed"):
            if not hasattr(samples, name):
                setattr(self, name, partial(getattr(Dataset, name), self))

    @property
    def longest(self) -> int:
        return int(getattr(self.dataset, "longest", 0))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped samples, for user-defined objectives and evaluators."""
        if name == "dataset":  # during unpickling, before this attribute is set
            raise AttributeError(name)
        return getattr(self.dataset, name)


def as_dataset(samples: Samples) -> Dataset:
    """Wrap samples so that they have all methods of a `Dataset`; return a `Dataset` unchanged."""
    return samples if isinstance(samples, Dataset) else _Adapted(samples)


def class_name(dataset: Dataset) -> str:
    """Return the class name of the innermost wrapped dataset, for messages."""
    while isinstance(dataset, WrappedDataset):
        dataset = dataset.dataset
    return type(dataset).__name__
