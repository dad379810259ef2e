"""Dataset of conversations about images."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.configured import configured_by
from foundry.config.schemas.data import ChatFiles, PictureFit, TrainOn
from foundry.config.schemas.data import ImageChatFiles as ImageChatFilesSettings
from foundry.data.conversations.chat import ChatTemplate, Segment
from foundry.data.conversations.chats import RowForm, chat_splits
from foundry.data.conversations.examples import BadRowError
from foundry.data.conversations.messages import check_template_columns, read_messages, trained_segments
from foundry.data.images.picture_examples import RowPictures
from foundry.data.images.pictures import read_picture, unreadable
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.file_digests import file_digests
from foundry.data.io.row_source import RowSource, find_rows
from foundry.data.io.rows import Row
from foundry.data.splits import DataSplits
from foundry.run_dir.files import read_text

_FORMAT = 1
_COLUMNS = ("image", "messages", "prompt", "completion")
_IMAGES, _ERRORS = "images.npy", "wrong.json"


@configured_by(ImageChatFilesSettings)
def image_chat_files(settings: ImageChatFilesSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of conversations about images.

    Rows have the columns of `chat_files` and `image`, the path of a PNG, JPEG or WebP file relative to the row's file.
    Images are decoded once into a memory-mapped array in the cache. The split depends only on the order of the rows.

    Raises:
        ConfigError: see `chat_files`; a row whose image cannot be read counts as a row that cannot be used.
    """
    rows = ChatFiles(
        path=settings.path,
        validation_path=settings.validation_path,
        held_out=settings.held_out,
        cache_dir=settings.cache_dir,
        on_bad_row=settings.on_bad_row,
    )
    source = find_rows(rows, _COLUMNS)
    pictures, errors = _read_pictures(source, settings.image_size, settings.cache_dir)
    train_on = settings.train_on
    form = RowForm(
        segments=partial(_segments, source.places, errors, 1 if train_on is TrainOn.last else None),
        description=f"image {train_on.value}",
    )
    return chat_splits(add_picture_hash(source, pictures), form, settings, pictures=pictures)


def add_picture_hash(source: RowSource, pictures: RowPictures) -> RowSource:
    """Return `source` with the hash of the images appended to its fingerprint and its content hash."""
    fingerprint, content = (f"{text}-{pictures.content}" for text in (source.fingerprint, source.content))
    return replace(source, fingerprint=fingerprint, content=content)


def _read_pictures(source: RowSource, size: int, cache_dir: str) -> tuple[RowPictures, Mapping[str, str]]:
    """Decode the image files of all rows, each file once, or read them from the cache.

    Returns:
        The images, and the reasons why files cannot be read, by path.

    Raises:
        ConfigError: rows cannot be read, or the cache cannot be written.
    """
    numbers = dict[Path, int]()
    places = tuple(_number_pictures(rows, source.places, numbers) for rows in source.splits)
    files, missing = list(numbers), dict[str, str]()
    for file in files:
        try:
            if not file.is_file():
                missing[str(file)] = "is not a file"
        except (OSError, ValueError) as error:  # such as a name that no file can have
            missing[str(file)] = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    existing = [file for file in files if str(file) not in missing]
    digests = dict(zip(existing, file_digests(existing, cache_dir), strict=True))
    digest_bytes = b"".join(digests.get(file, bytes(32)) for file in files)
    name = hashlib.sha256(f"row pictures {_FORMAT} {size} ".encode() + digest_bytes).hexdigest()[:32]
    folder = cached_folder(cache_dir, name, partial(_fill, files, missing, size), contents="images")
    errors = {str(files[int(number)]): reason for number, reason in json.loads(read_text(folder / _ERRORS)).items()}
    images = np.load(folder / _IMAGES, mmap_mode="r", allow_pickle=False)
    return RowPictures(images=images, places=(places[0], places[1]), content=name), errors


def _number_pictures(rows: Iterable[Row], places: Sequence[str], numbers: dict[Path, int]) -> NDArray[np.int64]:
    """Return the image index of each row, (rows,) int64, and add new files to `numbers`.

    Rows without an image get 0, which is never used because these rows are rejected.
    """
    indices = list[int]()
    for row in rows:
        file = _picture_of(row, places)
        indices.append(0 if file is None else numbers.setdefault(file, len(numbers)))
    return np.array(indices, dtype=np.int64)


def _picture_of(row: Row, places: Sequence[str]) -> Path | None:
    name = row.columns.get("image")
    return Path(places[row.file]).parent / name if isinstance(name, str) and name else None


def _fill(files: Sequence[Path], missing: Mapping[str, str], size: int, folder: Path) -> tuple[str, ...]:
    """Write the decoded images and the errors of unreadable ones, and return the names of the written files."""
    errors = dict[int, str]()
    shape = (max(1, len(files)), 3, size, size)  # at least one image, because an empty file cannot be memory-mapped
    images = np.lib.format.open_memmap(folder / _IMAGES, mode="w+", dtype=np.uint8, shape=shape)
    for number, file in enumerate(files):
        try:
            if str(file) in missing:
                raise ValueError(missing[str(file)])
            images[number] = read_picture(file, size=size, channels=3, fit=PictureFit.stretch)
        except (OSError, ValueError) as error:
            errors[number] = unreadable(error)
    images.flush()
    (folder / _ERRORS).write_text(json.dumps(errors))
    return _IMAGES, _ERRORS


def _segments(
    places: Sequence[str], errors: Mapping[str, str], num_trained: int | None, template: ChatTemplate, row: Row
) -> list[list[Segment]]:
    """Return the conversation of a row, after a check of its image.

    Raises:
        BadRowError: the row has no image, the image cannot be read, or see `trained_segments`.
    """
    file = _picture_of(row, places)
    if file is None:
        value: Any = row.columns.get("image")
        problem = "has no image" if value in (None, "") else f"has {type(value).__name__} as image, not a path"
        raise BadRowError(
            "without a picture", f"{problem}; give the path of an image file, relative to this file's folder"
        )
    if (reason := errors.get(str(file))) is not None:
        raise BadRowError("picture cannot be read", f"has image {row.columns['image']}, which {reason}")
    check_template_columns(template, row.columns)
    return [trained_segments(template, read_messages(row.columns), num_trained)]
