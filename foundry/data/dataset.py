"""Datasets: how the run reads samples, and how datasets that know less are read in the same way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate


class Samples(Protocol):
    """Samples by index: a `torch.utils.data.Dataset` or a list, of dicts of tensors."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """One sample, without a batch dimension."""
        ...


class Dataset(ABC):
    """Samples by index. A subclass has `__len__` and `__getitem__`; each further method has a default."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample, without a batch dimension."""

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Samples stacked along a first dimension; by default each is read by itself."""
        return cast(dict[str, Tensor], default_collate([self[index] for index in indices]))

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> dict[str, Tensor]:
        """Samples as training reads them at these positions of the global order, possibly augmented.

        Evaluations read `batch`, and so do columns, which are computed once before the first step. By default both
        methods return the same.
        """
        return self.batch(indices)

    @property
    def longest(self) -> int:
        """The index of the sample that needs the most memory; by default the first, if all have one size."""
        return 0

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64] | None:
        """(len(indices),) int64, tokens of each sample; of samples of several parts (len(indices), parts).

        None: samples cannot share rows, which `data.packing` asks for; see `packed`.
        """
        return None

    def num_tokens(self, indices: Sequence[int]) -> int | None:
        """Tokens of these samples together, without padding; None: `DataSplits.tokens_per_sample` in each."""
        lengths = self.lengths_of(indices)
        return None if lengths is None else int(lengths.sum())

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Samples in rows as `Examples.packed` has them, or as `Pairs.packed` if they have two parts."""
        raise NotImplementedError(f"{type(self).__name__} has lengths_of() but not packed()")


class BatchDataset(Dataset):
    """A dataset that reads several samples at once; one is a batch of one."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample, without a batch dimension."""
        return {name: value[0] for name, value in self.batch([index]).items()}

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Samples stacked along a first dimension."""


class WrappedDataset(Dataset):
    """The samples of another dataset. A subclass overrides the methods that it answers otherwise.

    Args:
        dataset: the other dataset, which answers all other methods.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample, without a batch dimension."""
        return self.dataset[index]

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Samples stacked along a first dimension."""
        return self.dataset.batch(indices)

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> dict[str, Tensor]:
        """Samples as they are at these positions of the global order."""
        return self.dataset.batch_at(indices, positions)

    @property
    def longest(self) -> int:
        """The index of the sample that needs the most memory."""
        return self.dataset.longest

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64] | None:
        """Tokens of each sample; None: they cannot share rows."""
        return self.dataset.lengths_of(indices)

    def num_tokens(self, indices: Sequence[int]) -> int | None:
        """Tokens of these samples together; None: as many in each."""
        return self.dataset.num_tokens(indices)

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Samples in rows that they share."""
        return self.dataset.packed(packs)


class _Adapted(WrappedDataset):
    """Samples of any class, with default methods in place of missing ones."""

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
        """Attributes of the class itself, for a user's own objective or evaluator."""
        if name == "dataset":  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def as_dataset(samples: Samples) -> Dataset:
    """Return samples with all methods of a `Dataset`; a `Dataset` is returned as it is."""
    return samples if isinstance(samples, Dataset) else _Adapted(samples)


def class_name(dataset: Dataset) -> str:
    """Return the name of the innermost class, for messages."""
    while isinstance(dataset, WrappedDataset):
        dataset = dataset.dataset
    return type(dataset).__name__
