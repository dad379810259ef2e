"""Demonstrations in LeRobot's format, version 3, read without its package.

Frames are rows of Parquet files, several episodes in each; meta/episodes says which files an episode is in. Pictures
are in these rows, or frames of videos. `meta/stats.json` is not read: statistics are of training episodes alone.
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
"""By how much of the time between two frames a picture may come earlier or later than its row says."""


@configured_by(LeRobot)
def lerobot(settings: LeRobot, *, seed: int) -> DataSplits:
    """Episodes of a folder in LeRobot's format, as windows.

    Args:
        settings: the folder and its columns, and how episodes are cut into windows.
        seed: unused: runs with different seeds are measured on the same held-out episodes.

    Raises:
        ConfigError: it is no such folder, is not whole, has too few episodes, or has other dimensions.
    """
    info = read_info(settings.path)
    for key, given, column, chosen in (
        ("data.state_dim", settings.state_dim, settings.state_key, "data.state_key"),
        ("data.action_dim", settings.action_dim, settings.action_key, "data.action_key"),
    ):
        if (own := info.num_values(column, chosen)) != given:
            message = f"is {given} but {column} of {settings.path} has {own} numbers; leave it out"
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
    return episode_splits(
        recording,
        num_observations=settings.num_observations,
        horizon=settings.horizon,
        held_out=settings.held_out,
        instruction_tokens=settings.instruction_tokens,
        tokenizer=settings.tokenizer,
        vocab_size=settings.vocab_size,
    )


@dataclass(frozen=True)
class _Place:
    """Where an episode's pictures are: a file of videos, and the second at which they begin in it."""

    file: Path
    second: float


@dataclass(frozen=True)
class _Episodes:
    """What meta/episodes says, in the order of episodes.

    Attributes:
        lengths: frames of each.
        files: of data, in the order of episodes.
        videos: of each episode, where the pictures are videos.
    """

    lengths: NDArray[np.int64]
    files: list[Path]
    videos: list[_Place] | None

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
    """All episodes of a folder: numbers in memory, pictures decoded once into the cache.

    Args:
        info: of the folder.
        state_key: column of the states.
        action_key: column of the actions.
        pictures: their column, and height and width to bring them to; None: they are not read.
        cache_dir: the cache's parent folder.
        has_tasks: read what was to be done, too.

    Raises:
        ConfigError: the folder is not whole, or the cache cannot be written.
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
        files += sorted({place.file for place in episodes.videos or ()})
        digests = b"".join(file_digests(files, cache_dir))
        settings = f"{_FORMAT} {image_key} {size} {digests.hex()}"
        source = hashlib.sha256(settings.encode()).hexdigest()[:32]
        shape = (int(episodes.lengths.sum()), 3, size, size)
        folder = cached_folder(cache_dir, source, partial(_fill, shape, fill), what="pictures")
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
    """The texts of tasks, and which of them each frame has: of `Recording`.

    Raises:
        ConfigError: the folder does not say them, or not of every frame.
    """
    file = info.folder / _TASKS
    if not file.is_file():
        _refuse(info, f"has no {_TASKS}, which says what was to be done; leave out data.instruction_tokens")
    with _explained(info, file):
        table = pq.read_table(file)
        # The text is the index of a table of pandas, to which some versions of LeRobot give no name.
        name = next((name for name in _TASK_NAMES if name in table.column_names), None)
        if name is None or _TASK_INDEX not in table.column_names:
            _refuse(info, f"has no columns {_TASK_NAMES[0]} and {_TASK_INDEX} in {_TASKS}")
        require_unique(table.schema, [name, _TASK_INDEX])
        texts = dict(zip(table[_TASK_INDEX].to_pylist(), table[name].to_pylist(), strict=True))
    if not all(type(number) is int and isinstance(text, str) for number, text in texts.items()):
        _refuse(info, f"has tasks in {_TASKS} that are no texts with a number")
    tasks = sorted(set(texts.values()))
    found = np.unique(task_index)
    if unknown := [number for number in found.tolist() if number not in texts]:
        _refuse(info, f"has frames of task {unknown[0]:g}, which {_TASKS} does not know")
    place = np.array([tasks.index(texts[int(number)]) for number in found], dtype=np.int64)
    return {"tasks": tuple(tasks), "task_index": place[np.searchsorted(found, task_index)]}


def _episode_files(info: LeRobotInfo) -> list[Path]:
    return sorted((info.folder / "meta" / "episodes").glob("*/*.parquet"))


def _read_episodes(info: LeRobotInfo, video_key: str | None) -> _Episodes:
    """See `_Episodes`.

    Raises:
        ConfigError: episodes are missing or said twice, or it is not said where they are.
    """
    places = ("data/chunk_index", "data/file_index")
    columns = ["episode_index", "length", *places]
    if video_key is not None:
        columns += [f"videos/{video_key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    found = defaultdict[str, list[Any]](list)
    for file in _episode_files(info):
        for batch in _batches(info, file, columns):
            for name in columns:
                found[name] += _numbers(info, name, batch.column(name))
    if not found["episode_index"]:
        _refuse(info, "has no episodes in meta/episodes")
    order = np.argsort(np.array(found["episode_index"], dtype=np.int64), kind="stable").tolist()
    rows = [[found[name][row] for name in columns] for row in order]
    if [row[0] for row in rows] != list(range(len(rows))):
        _refuse(info, f"has {len(rows)} episodes in meta/episodes, which are not numbered from 0 on")
    if empty := [row[0] for row in rows if row[1] == 0]:
        _refuse(info, f"has no frame in episode {empty[0]}")
    files = list(dict.fromkeys(info.data_file(row[2], row[3]) for row in rows))
    videos = None
    if video_key is not None:
        videos = [_Place(info.video_file(video_key, row[4], row[5]), float(row[6])) for row in rows]
    if sum(found["length"]) > _MOST_FRAMES:
        _refuse(info, f"has {sum(found['length'])} frames in meta/episodes, more than {_MOST_FRAMES}")
    for file in (*files, *(place.file for place in videos or ())):
        with _explained(info, file):
            file.stat()
    return _Episodes(np.array([row[1] for row in rows], dtype=np.int64), files, videos)


def _numbers(info: LeRobotInfo, name: str, column: pa.Array) -> list[Any]:
    """Return a column of the table of episodes: whole numbers from 0 on, or seconds.

    Raises:
        ConfigError: it has another type, or a value that is missing, negative or not finite.
    """
    is_time = name.endswith("timestamp")
    if not (pa.types.is_integer(column.type) or (is_time and pa.types.is_floating(column.type))):
        kind = "numbers" if is_time else "whole numbers"
        _refuse(info, f"has {name} of type {column.type} in meta/episodes, not {kind}")
    values: list[Any] = column.to_pylist()
    if not all(value is not None and 0 <= value < _MOST_NUMBER for value in values):
        _refuse(info, f"does not say {name} of each episode in meta/episodes as a number from 0 on")
    return values


def _read_numbers(info: LeRobotInfo, episodes: _Episodes, widths: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """Columns of numbers, (frames, width) each, in the order of episodes: float32, of timestamps and tasks float64.

    Raises:
        ConfigError: frames are missing or there twice, or are not of this width.
    """
    total, rows = int(episodes.lengths.sum()), 0
    for file in episodes.files:
        with _explained(info, file):
            rows += pq.read_metadata(file).num_rows
    if rows < total:
        _refuse(info, f"has {rows} frames in its data files and {total} in meta/episodes")
    types = {name: np.float64 if name in ("timestamp", _TASK_INDEX) else np.float32 for name in widths}
    arrays: dict[str, NDArray[Any]] = {name: np.empty((total, width), types[name]) for name, width in widths.items()}
    times = np.zeros(total, dtype=np.int64)
    for at, batch in _rows(info, episodes, list(widths)):
        np.add.at(times, at, 1)
        for name, width in widths.items():
            arrays[name][at] = _vectors(info, name, batch.column(name), width)
    if (times != 1).any():
        frame = int(np.flatnonzero(times != 1)[0])
        episode = int(np.searchsorted(episodes.starts, frame, side="right")) - 1
        how = "not" if times[frame] == 0 else "twice"
        _refuse(info, f"has frame {frame - episodes.starts[episode]} of episode {episode} {how} in its data files")
    return arrays


def _rows(
    info: LeRobotInfo, episodes: _Episodes, columns: list[str]
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """Some rows of the data files at a time, and which frame of all each of them is."""
    for file in episodes.files:
        for batch in _batches(info, file, ["episode_index", "frame_index", *columns]):
            places = [_vectors(info, name, batch.column(name), 1)[:, 0] for name in ("episode_index", "frame_index")]
            if not np.isfinite(places).all():
                _refuse(info, f"has frames in {file.name} without a number")
            episode, frame = (place.astype(np.int64) for place in places)
            is_known = (episode >= 0) & (episode < len(episodes.lengths))
            if not is_known.all() or (frame < 0).any() or (frame >= episodes.lengths[episode]).any():
                _refuse(info, f"has frames in {file.name} that meta/episodes does not know")
            yield episodes.starts[episode] + frame, batch


def _vectors(info: LeRobotInfo, name: str, column: pa.Array, width: int) -> NDArray[Any]:
    """A column as (rows, width); a column of single numbers has the width 1."""
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    if is_list or pa.types.is_fixed_size_list(values.type):
        lengths = pc.list_value_length(values)
        if values.null_count or pc.any(pc.not_equal(lengths, width)).as_py():
            _refuse(info, f"has rows of {name} that have not {width} numbers")
        values = values.flatten()
    if values.null_count or len(values) != len(column) * width:
        _refuse(info, f"has rows of {name} that have not {width} numbers")
    with ForeignData(lambda _: _wrong(info, f"has rows of {name} that are no numbers")):
        return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.float64).reshape(len(column), width)


def _fill(shape: tuple[int, ...], fill: Callable[[NDArray[np.uint8]], None], folder: Path) -> tuple[str, ...]:
    """Write the pictures of all frames; the names of the files."""
    images = np.lib.format.open_memmap(folder / _IMAGES, mode="w+", dtype=np.uint8, shape=shape)
    fill(images)
    images.flush()
    return (_IMAGES,)


def _copy_images(info: LeRobotInfo, episodes: _Episodes, image_key: str, size: int, images: NDArray[np.uint8]) -> None:
    """Pictures in the rows themselves, each as a file's content beside a name that is not looked at."""
    own = info.picture_size(image_key, "data.image_key")
    for at, batch in _rows(info, episodes, [image_key]):
        for frame, cell in zip(at.tolist(), batch.column(image_key).to_pylist(), strict=True):
            content = cell.get("bytes") if isinstance(cell, dict) else cell
            if not isinstance(content, bytes):
                _refuse(info, f"has rows without a picture in {image_key}")
            try:
                images[frame] = fitted(decode_picture(content, own), size)
            except ValueError as error:
                _refuse(info, f"has a row whose {image_key} {error}")


def _copy_frames(
    info: LeRobotInfo, episodes: _Episodes, timestamps: NDArray[np.float64], size: int, images: NDArray[np.uint8]
) -> None:
    """Frames of videos, each file decoded once from its beginning; a frame belongs to the rows of its time."""
    assert episodes.videos is not None
    seconds = timestamps + np.repeat([place.second for place in episodes.videos], episodes.lengths)
    tolerance = _TOLERANCE / info.fps
    by_file = defaultdict[Path, list[int]](list)
    for episode, place in enumerate(episodes.videos):
        by_file[place.file].append(episode)
    for file, members in by_file.items():
        spans = [episodes.starts[e] + np.arange(episodes.lengths[e]) for e in members]
        wanted = np.concatenate(spans)
        wanted = wanted[np.argsort(seconds[wanted], kind="stable")]
        ahead = 0
        with _explained(info, file):
            for second, picture in video_frames(file):
                if ahead == len(wanted) or seconds[wanted[ahead]] < second - tolerance:
                    break
                if seconds[wanted[ahead]] <= second + tolerance:
                    pixels = fitted(picture(), size)
                while ahead < len(wanted) and seconds[wanted[ahead]] <= second + tolerance:
                    images[wanted[ahead]] = pixels
                    ahead += 1
        if ahead < len(wanted):
            _refuse(info, f"has no picture at second {seconds[wanted[ahead]]:.4f} of {file.name}")


def _batches(info: LeRobotInfo, file: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """A Parquet file, some rows at a time."""
    with _explained(info, file), pq.ParquetFile(file) as parquet:
        if missing := [name for name in columns if name not in parquet.schema_arrow.names]:
            _refuse(info, f"has no column {missing[0]} in {file.relative_to(info.folder)}")
        require_unique(parquet.schema_arrow, columns)
        yield from parquet.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=columns)


@contextmanager
def _explained(info: LeRobotInfo, file: Path) -> Iterator[None]:
    """Have pyarrow or the decoder read a regular file of the folder; its errors are ConfigErrors."""
    name = file.relative_to(info.folder)
    with ForeignData(lambda reason: _wrong(info, f"has {name}, which cannot be read: {reason}")):
        require_regular(file)
        yield


def _wrong(info: LeRobotInfo, message: str) -> ConfigError:
    return ConfigError(Violation("data.path", f"is {info.folder}, which {message}"))


def _refuse(info: LeRobotInfo, message: str) -> NoReturn:
    raise _wrong(info, message)
