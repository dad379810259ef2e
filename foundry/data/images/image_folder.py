"""Dataset of an image folder with one subfolder per class, the layout of torchvision's `ImageFolder`."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundry.config.configured import configured_by
from foundry.config.image_folder import class_folders
from foundry.config.schemas.data import ImageFolder as ImageFolderSettings
from foundry.core.errors import ConfigError, Violation, as_text, counted, listed
from foundry.data.dataset import BatchDataset, Dataset, WrappedDataset
from foundry.data.images.digits import stratified_split
from foundry.data.images.pictures import SUFFIXES, read_picture, unreadable
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.file_digests import file_digests
from foundry.data.io.mapped_files import MapsFiles
from foundry.data.splits import DataSplits

_FORMAT = 1
_IMAGES = "images.npy"
_AT_A_TIME = 256
_SECONDS_BETWEEN_LINES = 10.0
_MAX_NAMES = 64
log = logging.getLogger(__name__)


class Shifted(WrappedDataset):
    """Augmentation by random shifts of a few pixels in training, as in He et al. (2016), 4.2.

    The shift is drawn from a Philox generator keyed by the seed, with the position in the global order as its counter,
    so it does not depend on ranks, microbatches or interruptions.
    """

    def __init__(self, pictures: Dataset, *, max_shift: int, seed: int) -> None:
        """Wrap a dataset of images.

        Args:
            pictures: the images.
            max_shift: maximum shift in pixels in each direction; border pixels are replicated.
            seed: seed of the run.
        """
        super().__init__(pictures)
        self._max_shift = max_shift
        self._key = int.from_bytes(hashlib.sha256(f"random_crop {seed}".encode()).digest()[:16], "little")

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch with each image shifted by the amount for its position."""
        batch = super().batch_at(indices, positions)
        size = batch["images"].shape[-1]
        padded = torch.nn.functional.pad(batch["images"], (self._max_shift,) * 4, mode="replicate")
        for row, (down, right) in enumerate(self._shifts(positions)):
            batch["images"][row] = padded[row, :, down : down + size, right : right + size]
        return batch

    def _shifts(self, positions: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the crop offsets (down, right) in the padded image at each position, from 0 to twice `max_shift`."""
        for position in positions:
            generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, position, 0, 0]))
            down, right = generator.integers(2 * self._max_shift + 1, size=2).tolist()
            yield down, right


class Pictures(MapsFiles, BatchDataset):
    """Dataset of a subset of the images in a memory-mapped array, with class labels."""

    def __init__(
        self, images: NDArray[np.uint8], labels: NDArray[np.int64], members: NDArray[np.int64], *, mirror: bool
    ) -> None:
        """Initialize the dataset.

        Args:
            images: all images, (n, channels, height, width) uint8.
            labels: class of each image, (n,) int64.
            members: indices of the images in this dataset, (m,) int64.
            mirror: append the horizontally flipped version of each image to the dataset.
        """
        self._images, self._labels, self._members, self._mirror = images, labels, members, mirror

    def __len__(self) -> int:
        """Return the number of images, flipped versions included."""
        return len(self._members) * (2 if self._mirror else 1)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `images`, (batch, channels, height, width) float32 in [-1, 1], and `labels`, (batch,) int64."""
        turned, place = np.divmod(np.asarray(indices, dtype=np.int64), len(self._members))
        at = self._members[place]
        pixels = self._images[at]
        pixels = np.where(turned[:, None, None, None] == 1, pixels[..., ::-1], pixels)
        return {"images": torch.from_numpy(pixels).float() / 127.5 - 1.0, "labels": torch.from_numpy(self._labels[at])}


@configured_by(ImageFolderSettings)
def image_folder(settings: ImageFolderSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of an image folder; images are decoded once into the cache.

    The class index is the index of the subfolder in the sorted list of names. Validation images are selected by a hash
    of their names, within each class, so most images stay in their split if images are added.

    Args:
        settings: folder, and size, channels and augmentation of the images.
        seed: seed of the random shifts; the split does not depend on it.

    Raises:
        ConfigError: the folder does not exist, a file with the suffix of an image cannot be decoded, a class has too
            few images for held_out, or num_classes differs from the number of subfolders.
    """
    path, cache_dir, random_crop = settings.path, settings.cache_dir, settings.random_crop
    size, channels, fit = settings.image_size, settings.num_channels, settings.fit
    folders = class_folders(path)
    if settings.num_classes != len(folders):
        reason = f"{path} has {counted(len(folders), 'folder')}"
        raise ConfigError(Violation("data.num_classes", f"is {settings.num_classes} but {reason}; leave it out"))
    root, files, labels, ignored = Path(path).expanduser(), list[Path](), list[int](), 0
    for label, folder in enumerate(folders):
        pictures, num_others = _pictures_in(folder)
        if not pictures:
            message = f"has no image in {as_text(str(folder))} ({', '.join(SUFFIXES)})"
            raise ConfigError(Violation("data.path", message))
        files += pictures
        labels += [label] * len(pictures)
        ignored += num_others
    if ignored:
        kind = "file" if ignored == 1 else "files"
        log.warning("skipped %d %s in %s without a suffix of an image (%s)", ignored, kind, path, ", ".join(SUFFIXES))
    names = [file.relative_to(root).as_posix() for file in files]
    try:
        digests = b"".join(file_digests(files, cache_dir))
    except OSError as error:
        message = f"has {as_text(str(error.filename))}, which cannot be read: {error.strerror}"
        raise ConfigError(Violation("data.path", message)) from None
    description = f"image_folder {_FORMAT} {size} {channels} {fit.name}"
    content = hashlib.sha256(f"{description} {digests.hex()}".encode()).hexdigest()[:32]
    shape = (len(files), channels, size, size)
    fill = partial(_fill, files, shape, partial(read_picture, size=size, channels=channels, fit=fit))
    cached = cached_folder(cache_dir, content, fill, contents="images")
    images = np.load(cached / _IMAGES, mmap_mode="r", allow_pickle=False)
    classes = np.array(labels, dtype=np.int64)
    is_held_out = stratified_split(
        classes, settings.held_out, [name.encode(errors="surrogateescape") for name in names]
    )
    train, validation = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    class_names = tuple(folder.name for folder in folders)
    split = hashlib.sha256(f"{content} {class_names} {labels} {settings.mirror}".encode(errors="surrogateescape"))
    split.update(f" {random_crop}".encode() if random_crop else b"")
    split.update(is_held_out.tobytes())
    train_pictures = Pictures(images, classes, train, mirror=settings.mirror)
    return DataSplits(
        train=Shifted(train_pictures, max_shift=random_crop, seed=seed) if random_crop else train_pictures,
        validation=Pictures(images, classes, validation, mirror=False),
        fingerprint=split.hexdigest()[:32],
        class_names=class_names,
        notes={
            "train_images": len(train),
            "validation_images": len(validation),
            "classes": listed([as_text(name) for name in class_names], _MAX_NAMES),
            "pictures": str(cached),
        },
    )


def _pictures_in(folder: Path) -> tuple[list[Path], int]:
    """Return the sorted image files below a folder, and the number of other files; hidden files are ignored."""
    pictures, num_others = list[Path](), 0
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if Path(name).suffix.lower() in SUFFIXES:
                pictures.append(Path(parent, name))
            else:
                num_others += 1
    return sorted(pictures), num_others


def _fill(
    files: Sequence[Path], shape: tuple[int, ...], read: Callable[[Path], NDArray[np.uint8]], folder: Path
) -> tuple[str, ...]:
    """Decode all images into one array in the folder, and return the names of the written files."""
    images = np.lib.format.open_memmap(folder / _IMAGES, mode="w+", dtype=np.uint8, shape=shape)
    start_time = last_log_time = time.monotonic()
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:  # Pillow releases the GIL while it decodes
        for start, chunk in _chunks(files):
            for index, picture in enumerate(pool.map(partial(_read, read), chunk), start=start):
                images[index] = picture
            if (now := time.monotonic()) - last_log_time > _SECONDS_BETWEEN_LINES:
                last_log_time = now
                log.info("decoded %d of %d images", start + len(chunk), len(files))
    images.flush()
    log.info("decoded %d images in %.1f s", len(files), time.monotonic() - start_time)
    return (_IMAGES,)


def _chunks(files: Sequence[Path]) -> Iterator[tuple[int, Sequence[Path]]]:
    for start in range(0, len(files), _AT_A_TIME):
        yield start, files[start : start + _AT_A_TIME]


def _read(read: Callable[[Path], NDArray[np.uint8]], file: Path) -> NDArray[np.uint8]:
    """Read an image.

    Raises:
        ConfigError: the file is not a readable image.
    """
    try:
        return read(file)
    except (OSError, ValueError) as error:
        message = f"has {as_text(str(file))}, which {unreadable(error)}; remove or rename it"
        raise ConfigError(Violation("data.path", message)) from None
