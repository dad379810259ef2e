"""Reader of demonstrations in LeRobot's format, version 3, without the package lerobot.

Frames are rows of Parquet files with several episodes each; meta/episodes maps episodes to files. Images are stored in
these rows or as frames of videos. `meta/stats.json` is not read, because statistics must cover only the training
episodes.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from numpy.typing import NDArray

from foundry.config.configured import configured_by
from foundry.core.errors import ConfigError, Violation
from foundry.core.foreign import ForeignData
from foundry.data.images.pictures import decode_picture, fitted, video_frames
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.file_digests import file_digests
from foundry.data.io.nested import require_unique
from foundry.data.splits import DataSplits
from foundry.run_dir.files import require_regular
from foundry.tasks.robots.data.episodes import Recording, episode_splits
from foundry.tasks.robots.lerobot_info import LeRobotInfo, read_info
from foundry.tasks.robots.schemas.data import LeRobot

_FORMAT = 1
_IMAGES = "images.npy"
_TASKS, _TASK_INDEX = "meta/tasks.parquet", "task_index"
_TASK_NAMES = ("task", "__index_level_0__")
_ROWS_AT_A_TIME = 256
_MOST_NUMBER, _MOST_FRAMES = 2**53, 2**60
_TOLERANCE = 0.25
"""Maximum deviation of an image's time from its row's timestamp, as a fraction of the time between two frames."""


@configured_by(LeRobot)
def lerobot(settings: LeRobot, *, seed: int) -> DataSplits:
    """Return the episodes of a folder in LeRobot's format as windows.

    Args:
        settings: the folder with its columns, and the sizes of the windows.
        seed: unused: runs with different seeds have the same held-out episodes.

    Raises:
        ConfigError: if the folder is no complete LeRobot dataset, has too few episodes, or has other sizes than set.
    """
    info = read_info(settings.path)
    for key, size, column, column_key in (
        ("data.state_dim", settings.state_dim, settings.state_key, "data.state_key"),
        ("data.action_dim", settings.action_dim, settings.action_key, "data.action_key"),
    ):
        if (num_values := info.num_values(column, column_key)) != size:
            message = f"is {size} but {column} of {settings.path} has {num_values} numbers; leave it out"
            raise ConfigError(Violation(key, message))
    image_key, image_size = settings.image_key, settings.image_size
    pictures = None if image_key is None or image_size is None else (image_key, image_size)
    recording = read_recording(
        info,
        state_key=settings.state_key,
        action_key=settings.action_key,
        pictures=pictures,
        has_tasks=settings.instruction_tokens is not None,
        cache_dir=settings.cache_dir,
    )
    return episode_splits(recording, settings)


@dataclass(frozen=True)
class _VideoLocation:
    """Location of an episode's images: a video file, and the second of the video at which the episode begins."""

    file: Path
    second: float


@dataclass(frozen=True)
class _Episodes:
    """Content of meta/episodes, in the order of episodes.

    Attributes:
        lengths: number of frames of each episode.
        files: data files in the order of their episodes.
        videos: location of each episode's images if they are videos, else None.
    """

    lengths: NDArray[np.int64]
    files: list[Path]
    videos: list[_VideoLocation] | None

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths


def read_recording(
    info: LeRobotInfo,
    *,
    state_key: str,
    action_key: str,
    pictures: tuple[str, int] | None,
    cache_dir: str,
    has_tasks: bool = False,
) -> Recording:
    """Read all episodes of a folder: numbers into memory, images decoded once into the cache.

    Args:
        info: metadata of the folder.
        state_key: column of the states.
        action_key: column of the actions.
        pictures: column of the images, and height and width to resize them to; None to read no images.
        cache_dir: parent folder of the cache.
        has_tasks: also read the instructions.

    Raises:
        ConfigError: if the folder is incomplete, or the cache is not writable.
    """
    image_key, size = pictures or (None, 0)
    video_key = image_key if image_key is not None and info.is_video(image_key) else None
    episodes = _read_episodes(info, video_key)
    numbers = {state_key: info.num_values(state_key, "data.state_key")}
    numbers[action_key] = info.num_values(action_key, "data.action_key")
    if video_key is not None:
        numbers["timestamp"] = 1
    if has_tasks:
        numbers[_TASK_INDEX] = 1
    columns = _read_numbers(info, episodes, numbers)
    images, source = None, ""
    if image_key is not None:
        fill: Callable[[NDArray[np.uint8]], None] = partial(_copy_images, info, episodes, image_key, size)
        if video_key is not None:
            fill = partial(_copy_frames, info, episodes, columns["timestamp"][:, 0], size)
        files = [*_episode_files(info), *episodes.files]
        files += sorted({location.file for location in episodes.videos or ()})
        digests = b"".join(file_digests(files, cache_dir))
        settings = f"{_FORMAT} {image_key} {size} {digests.hex()}"
        source = hashlib.sha256(settings.encode()).hexdigest()[:32]
        shape = (int(episodes.lengths.sum()), 3, size, size)
        folder = cached_folder(cache_dir, source, partial(_fill, shape, fill), contents="pictures")
        images = np.load(folder / _IMAGES, mmap_mode="r", allow_pickle=False)
    return Recording(
        state=columns[state_key].astype(np.float32, copy=False),
        actions=columns[action_key].astype(np.float32, copy=False),
        lengths=episodes.lengths,
        images=images,
        source=source,
        **(_read_tasks(info, columns[_TASK_INDEX][:, 0]) if has_tasks else {}),
    )


def _read_tasks(info: LeRobotInfo, task_index: NDArray[Any]) -> dict[str, Any]:
    """Return `tasks` and `task_index` of `Recording`.

    Raises:
        ConfigError: if the folder lacks the instructions of some frames.
    """
    file = info.folder / _TASKS
    if not file.is_file():
        _refuse(info, f"has no {_TASKS} with the instructions; leave out data.instruction_tokens")
    with _explained(info, file):
        table = pq.read_table(file)
        # The text is the index of a pandas table; some versions of LeRobot write this index without a name.
        name = next((name for name in _TASK_NAMES if name in table.column_names), None)
        if name is None or _TASK_INDEX not in table.column_names:
            _refuse(info, f"has no columns {_TASK_NAMES[0]} and {_TASK_INDEX} in {_TASKS}")
        require_unique(table.schema, [name, _TASK_INDEX])
        texts = dict(zip(table[_TASK_INDEX].to_pylist(), table[name].to_pylist(), strict=True))
    if not all(type(number) is int and isinstance(text, str) for number, text in texts.items()):
        _refuse(info, f"has tasks in {_TASKS} that are not strings with a number")
    tasks = sorted(set(texts.values()))
    indices = np.unique(task_index)
    if unknown := [number for number in indices.tolist() if number not in texts]:
        _refuse(info, f"has frames of task {unknown[0]:g}, which {_TASKS} does not contain")
    positions = np.array([tasks.index(texts[int(number)]) for number in indices], dtype=np.int64)
    return {"tasks": tuple(tasks), "task_index": positions[np.searchsorted(indices, task_index)]}


def _episode_files(info: LeRobotInfo) -> list[Path]:
    return sorted((info.folder / "meta" / "episodes").glob("*/*.parquet"))


def _read_episodes(info: LeRobotInfo, video_key: str | None) -> _Episodes:
    """Read meta/episodes.

    Raises:
        ConfigError: if episodes or their files are missing, or episodes are duplicated.
    """
    path_columns = ("data/chunk_index", "data/file_index")
    columns = ["episode_index", "length", *path_columns]
    if video_key is not None:
        columns += [f"videos/{video_key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    table = defaultdict[str, list[Any]](list)
    for file in _episode_files(info):
        for batch in _batches(info, file, columns):
            for name in columns:
                table[name] += _numbers(info, name, batch.column(name))
    if not table["episode_index"]:
        _refuse(info, "has no episodes in meta/episodes")
    order = np.argsort(np.array(table["episode_index"], dtype=np.int64), kind="stable").tolist()
    rows = [[table[name][row] for name in columns] for row in order]
    if [row[0] for row in rows] != list(range(len(rows))):
        _refuse(info, f"has {len(rows)} episodes in meta/episodes, which are not numbered consecutively from 0")
    if empty := [row[0] for row in rows if row[1] == 0]:
        _refuse(info, f"has no frame in episode {empty[0]}")
    files = list(dict.fromkeys(info.data_file(row[2], row[3]) for row in rows))
    videos = None
    if video_key is not None:
        videos = [_VideoLocation(info.video_file(video_key, row[4], row[5]), float(row[6])) for row in rows]
    if sum(table["length"]) > _MOST_FRAMES:
        _refuse(info, f"has {sum(table['length'])} frames in meta/episodes, more than {_MOST_FRAMES}")
    for file in (*files, *(location.file for location in videos or ())):
        with _explained(info, file):
            file.stat()
    return _Episodes(np.array([row[1] for row in rows], dtype=np.int64), files, videos)


def _numbers(info: LeRobotInfo, name: str, column: pa.Array) -> list[Any]:
    """Return a column of the table of episodes: nonnegative whole numbers, or seconds.

    Raises:
        ConfigError: if the column has another type, or a value that is missing, negative or too large.
    """
    is_time = name.endswith("timestamp")
    if not (pa.types.is_integer(column.type) or (is_time and pa.types.is_floating(column.type))):
        kind = "numbers" if is_time else "whole numbers"
        _refuse(info, f"has {name} of type {column.type} in meta/episodes, not {kind}")
    values: list[Any] = column.to_pylist()
    if not all(value is not None and 0 <= value < _MOST_NUMBER for value in values):
        _refuse(info, f"has episodes without a nonnegative {name} in meta/episodes")
    return values


def _read_numbers(info: LeRobotInfo, episodes: _Episodes, widths: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """Read columns of numbers, (frames, width) each, in the order of episodes.

    The arrays are float32, except for timestamps and tasks (float64).

    Raises:
        ConfigError: if frames are missing or duplicated, or a column has another width.
    """
    total, rows = int(episodes.lengths.sum()), 0
    for file in episodes.files:
        with _explained(info, file):
            rows += pq.read_metadata(file).num_rows
    if rows < total:
        _refuse(info, f"has {rows} frames in its data files but {total} in meta/episodes")
    types = {name: np.float64 if name in ("timestamp", _TASK_INDEX) else np.float32 for name in widths}
    arrays: dict[str, NDArray[Any]] = {name: np.empty((total, width), types[name]) for name, width in widths.items()}
    counts = np.zeros(total, dtype=np.int64)
    for indices, batch in _rows(info, episodes, list(widths)):
        np.add.at(counts, indices, 1)
        for name, width in widths.items():
            arrays[name][indices] = _vectors(info, name, batch.column(name), width)
    if (counts != 1).any():
        frame = int(np.flatnonzero(counts != 1)[0])
        episode = int(np.searchsorted(episodes.starts, frame, side="right")) - 1
        problem = "no" if counts[frame] == 0 else "a duplicate"
        _refuse(info, f"has {problem} frame {frame - episodes.starts[episode]} of episode {episode} in its data files")
    return arrays


def _rows(
    info: LeRobotInfo, episodes: _Episodes, columns: list[str]
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """Yield batches of rows of the data files, with the index of each row's frame in the recording."""
    for file in episodes.files:
        for batch in _batches(info, file, ["episode_index", "frame_index", *columns]):
            indices = [_vectors(info, name, batch.column(name), 1)[:, 0] for name in ("episode_index", "frame_index")]
            if not np.isfinite(indices).all():
                _refuse(info, f"has frames in {file.name} without a number")
            episode, frame = (values.astype(np.int64) for values in indices)
            is_known = (episode >= 0) & (episode < len(episodes.lengths))
            if not is_known.all() or (frame < 0).any() or (frame >= episodes.lengths[episode]).any():
                _refuse(info, f"has frames in {file.name} that meta/episodes does not contain")
            yield episodes.starts[episode] + frame, batch


def _vectors(info: LeRobotInfo, name: str, column: pa.Array, width: int) -> NDArray[Any]:
    """Return a column as (rows, width); a column of scalars has width 1."""
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    if is_list or pa.types.is_fixed_size_list(values.type):
        lengths = pc.list_value_length(values)
        if values.null_count or pc.any(pc.not_equal(lengths, width)).as_py():
            _refuse(info, f"has rows of {name} that do not have {width} numbers")
        values = values.flatten()
    if values.null_count or len(values) != len(column) * width:
        _refuse(info, f"has rows of {name} that do not have {width} numbers")
    with ForeignData(lambda _: _path_error(info, f"has rows of {name} that are not numbers")):
        return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.float64).reshape(len(column), width)


def _fill(shape: tuple[int, ...], fill: Callable[[NDArray[np.uint8]], None], folder: Path) -> tuple[str, ...]:
    """Write the images of all frames, and return the names of the written files."""
    images = np.lib.format.open_memmap(folder / _IMAGES, mode="w+", dtype=np.uint8, shape=shape)
    fill(images)
    images.flush()
    return (_IMAGES,)


def _copy_images(info: LeRobotInfo, episodes: _Episodes, image_key: str, size: int, images: NDArray[np.uint8]) -> None:
    """Decode and resize the images in the rows, stored as bytes, or as a struct of bytes and a path that is ignored."""
    stored_size = info.picture_size(image_key, "data.image_key")
    for rows, batch in _rows(info, episodes, [image_key]):
        for frame, cell in zip(rows.tolist(), batch.column(image_key).to_pylist(), strict=True):
            content = cell.get("bytes") if isinstance(cell, dict) else cell
            if not isinstance(content, bytes):
                _refuse(info, f"has rows without an image in {image_key}")
            try:
                images[frame] = fitted(decode_picture(content, stored_size), size)
            except ValueError as error:
                _refuse(info, f"has a row whose {image_key} {error}")


def _copy_frames(
    info: LeRobotInfo, episodes: _Episodes, timestamps: NDArray[np.float64], size: int, images: NDArray[np.uint8]
) -> None:
    """Resize video frames into `images`, for the rows with the matching timestamp; each file is decoded once."""
    assert episodes.videos is not None
    seconds = timestamps + np.repeat([location.second for location in episodes.videos], episodes.lengths)
    tolerance = _TOLERANCE / info.fps
    by_file = defaultdict[Path, list[int]](list)
    for episode, location in enumerate(episodes.videos):
        by_file[location.file].append(episode)
    for file, members in by_file.items():
        spans = [episodes.starts[e] + np.arange(episodes.lengths[e]) for e in members]
        frames = np.concatenate(spans)
        frames = frames[np.argsort(seconds[frames], kind="stable")]
        position = 0
        with _explained(info, file):
            for second, picture in video_frames(file):
                if position == len(frames) or seconds[frames[position]] < second - tolerance:
                    break
                if seconds[frames[position]] <= second + tolerance:
                    pixels = fitted(picture(), size)
                while position < len(frames) and seconds[frames[position]] <= second + tolerance:
                    images[frames[position]] = pixels
                    position += 1
        if position < len(frames):
            _refuse(info, f"has no video frame at second {seconds[frames[position]]:.4f} of {file.name}")


def _batches(info: LeRobotInfo, file: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield batches of rows of a Parquet file."""
    with _explained(info, file), pq.ParquetFile(file) as parquet:
        if missing := [name for name in columns if name not in parquet.schema_arrow.names]:
            _refuse(info, f"has no column {missing[0]} in {file.relative_to(info.folder)}")
        require_unique(parquet.schema_arrow, columns)
        yield from parquet.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=columns)


@contextmanager
def _explained(info: LeRobotInfo, file: Path) -> Iterator[None]:
    """Context for reading a file of the folder with pyarrow or the decoder, whose errors become ConfigErrors."""
    name = file.relative_to(info.folder)
    with ForeignData(lambda reason: _path_error(info, f"has {name}, which cannot be read: {reason}")):
        require_regular(file)
        yield


def _path_error(info: LeRobotInfo, message: str) -> ConfigError:
    return ConfigError(Violation("data.path", f"is {info.folder}, which {message}"))


def _refuse(info: LeRobotInfo, message: str) -> NoReturn:
    raise _path_error(info, message)
