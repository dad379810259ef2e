"""Text examples and prompts with one image each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundry.data.conversations.examples import Examples
from foundry.data.dataset import BatchDataset
from foundry.data.io.mapped_files import MapsFiles
from foundry.data.splits import Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPictures:
    """Images of the rows of a dataset.

    Attributes:
        images: (images, 3, image_size, image_size) uint8.
        places: image index of each row, (rows,) int64 for training and validation.
        content: hash of the images.
    """

    images: NDArray[np.uint8]
    places: tuple[NDArray[np.int64], NDArray[np.int64]]
    content: str


class PictureExamples(MapsFiles, BatchDataset):
    """`Examples` with one image each.

    Args:
        examples: tokens and targets.
        images: (images, 3, image_size, image_size) uint8.
        places: image index of each example, (examples,) int64.
    """

    def __init__(self, examples: Examples, images: NDArray[np.uint8], places: NDArray[np.int64]) -> None:
        self.examples, self.images, self.places = examples, images, places

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    @property
    def longest(self) -> int:
        """Index of the example with the most tokens, which needs the most memory."""
        return self.examples.longest

    def num_tokens(self, indices: Sequence[int]) -> int | None:
        """Return the total text tokens of these examples, without padding and without images."""
        return self.examples.num_tokens(indices)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `tokens` and `targets` as from `Examples.batch`, and `images`, (batch, 1, 3, size, size) uint8."""
        return {**self.examples.batch(indices), "images": self._images(indices)}

    def _images(self, indices: Sequence[int]) -> Tensor:
        at = self.places[np.asarray(indices, dtype=np.int64)]
        return torch.from_numpy(np.asarray(self.images[at])).unsqueeze(1)


class PicturePrompts(Sequence[Prompt]):
    """Prompts made from examples, each with the image of its example.

    Args:
        prompts: one prompt for each example, in the same order.
        examples: examples with images.
    """

    def __init__(self, prompts: Sequence[Prompt], examples: PictureExamples) -> None:
        self._prompts, self._examples = prompts, examples

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        """Return one prompt for an integer, or a list of prompts for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._prompts[index]._replace(images=self._examples[index]["images"])
