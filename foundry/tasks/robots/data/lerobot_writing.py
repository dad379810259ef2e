"""Writer of demonstrations in LeRobot's format, version 3, which LeRobot's tools can read too."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from numpy.typing import NDArray

from foundry.data.images.pictures import encode_png, import_av
from foundry.tasks.robots.lerobot_info import INFO

STATE_KEY, ACTION_KEY, IMAGE_KEY = "observation.state", "action", "observation.images.front"
"""LeRobot's column names of a policy's states, actions and camera images."""

_PART = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_DATA, _VIDEO = f"data/{_PART}.parquet", f"videos/{{video_key}}/{_PART}.mp4"
_EPISODES, _TASKS, _STATS = "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet", "meta/stats.json"
_CODEC, _CODEC_OPTIONS = "libsvtav1", {"g": "2", "crf": "30", "preset": "8"}
"""LeRobot's encoding, with a keyframe every second frame."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """A recorded episode.

    Attributes:
        state: (frames, state_dim) float32.
        actions: (frames, action_dim) float32; the action of a frame was chosen from its state.
        task: the instruction.
        images: (frames, height, width, 3) uint8, or None.
    """

    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    task: str = ""
    images: NDArray[np.uint8] | None = None


def write_lerobot(
    folder: Path,
    episodes: Iterable[Episode],
    *,
    fps: float,
    robot_type: str,
    as_video: bool = False,
    file_bytes: int = 100 * 2**20,
    files_per_chunk: int = 1000,
) -> tuple[str, ...]:
    """Write a LeRobot dataset, with one episode in memory at a time.

    Args:
        folder: an empty folder.
        episodes: one or more; all must have the same dimensions, and all or none must have images.
        fps: frames per second.
        robot_type: name of the robot.
        as_video: write images as videos with lossy compression, instead of PNG data in the rows.
        file_bytes: size of a data file after which a new one is started.
        files_per_chunk: number of files per folder.

    Returns:
        The names of the written files, relative to the folder.

    Raises:
        ConfigError: if `as_video` is set and the video package is not installed.
    """
    with _Writer(folder, fps, as_video, file_bytes, files_per_chunk) as writer:
        for episode in episodes:
            writer.add(episode)
    return (*writer.files, *writer.write_meta(robot_type))


class _Writer:
    def __init__(self, folder: Path, fps: float, as_video: bool, file_bytes: int, files_per_chunk: int) -> None:
        self.files = list[str]()
        self._folder, self._fps, self._as_video = folder, fps, as_video
        self._file_bytes, self._files_per_chunk = file_bytes, files_per_chunk
        self._features: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, int] = {}
        self._rows = list[dict[str, Any]]()
        self._frames = self._num_data_files = 0
        self._open: pq.ParquetWriter | None = None

    def __enter__(self) -> "_Writer":
        self._stack = ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, episode: Episode) -> None:
        """Write an episode to the current data file, and with `as_video` its images to a new video."""
        numbers = self._numbers(episode)
        columns = {name: _column(values) for name, values in numbers.items()}
        features = {name: _feature(values) for name, values in numbers.items()}
        if episode.images is not None:
            kind = "video" if self._as_video else "image"
            names = ["height", "width", "channels"]
            features[IMAGE_KEY] = {"dtype": kind, "shape": list(episode.images.shape[1:]), "names": names}
            if not self._as_video:
                cells = [{"bytes": encode_png(picture), "path": None} for picture in episode.images]
                columns[IMAGE_KEY] = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        self._features = features
        chunk, file = divmod(self._write(pa.table(columns)), self._files_per_chunk)
        row = self._row(episode, chunk, file)
        stats = {name: _stats(values) for name, values in numbers.items()}
        if episode.images is not None:
            stats[IMAGE_KEY] = _picture_stats(episode.images)
            if self._as_video:
                row |= self._write_video(episode.images, len(self._rows))
        row |= {f"stats/{name}/{kind}": value for name, item in stats.items() for kind, value in item.items()}
        self._rows.append(row)
        self._frames += len(episode.state)

    def _numbers(self, episode: Episode) -> dict[str, NDArray[Any]]:
        """Return the columns of the next episode except its images, each with a row per frame."""
        length, number = len(episode.state), len(self._rows)
        task = self._tasks.setdefault(episode.task, len(self._tasks))
        return {
            STATE_KEY: episode.state,
            ACTION_KEY: episode.actions,
            "timestamp": (np.arange(length) / self._fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": np.arange(self._frames, self._frames + length),
            "task_index": np.full(length, task),
        }

    def _row(self, episode: Episode, chunk: int, file: int) -> dict[str, Any]:
        """Return the row of the next episode in the table of episodes, without statistics and videos."""
        length = len(episode.state)
        return {
            "episode_index": len(self._rows),
            "tasks": [episode.task],
            "length": length,
            "data/chunk_index": chunk,
            "data/file_index": file,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + length,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }

    def _write(self, table: pa.Table) -> int:
        """Append a table to the current data file, and return the file's number."""
        if self._open is None:
            chunk, file = divmod(self._num_data_files, self._files_per_chunk)
            path = self._add_path(_DATA.format(chunk_index=chunk, file_index=file))
            self._stream = self._stack.enter_context(path.open("wb"))
            self._open = self._stack.enter_context(pq.ParquetWriter(self._stream, table.schema))
            self._num_data_files += 1
        self._open.write_table(table)
        number = self._num_data_files - 1
        if self._stream.tell() >= self._file_bytes:
            self._stack.close()
            self._open = None
        return number

    def _write_video(self, images: NDArray[np.uint8], number: int) -> dict[str, Any]:
        """Write the video of an episode, and return the columns of meta/episodes that locate it."""
        av = import_av()
        chunk, file = divmod(number, self._files_per_chunk)
        path = self._add_path(_VIDEO.format(video_key=IMAGE_KEY, chunk_index=chunk, file_index=file))
        with av.open(str(path), "w") as container:
            stream = container.add_stream(_CODEC, rate=round(self._fps))
            stream.height, stream.width, stream.pix_fmt = *images.shape[1:3], "yuv420p"
            stream.options = _CODEC_OPTIONS
            for picture in images:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        location = {"chunk_index": chunk, "file_index": file, "from_timestamp": 0.0}
        location["to_timestamp"] = len(images) / self._fps
        return {f"videos/{IMAGE_KEY}/{name}": value for name, value in location.items()}

    def write_meta(self, robot_type: str) -> tuple[str, ...]:
        """Write the metadata, and return the names of the written files."""
        pq.write_table(pa.Table.from_pylist(self._rows), self._add_path(_EPISODES))
        pq.write_table(_task_table(list(self._tasks)), self._add_path(_TASKS))
        stats = {name: _merge_stats([_read_stats(row, name) for row in self._rows]) for name in self._features}
        self._add_path(_STATS).write_text(json.dumps(stats) + "\n")
        info = {
            "codebase_version": "v3.0",
            "robot_type": robot_type,
            "total_episodes": len(self._rows),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self._files_per_chunk,
            "data_files_size_in_mb": max(1, self._file_bytes // 2**20),
            "video_files_size_in_mb": 200,
            "fps": int(self._fps) if float(self._fps).is_integer() else self._fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": _DATA,
            "video_path": _VIDEO if self._as_video else None,
            "features": self._features,
        }
        self._add_path(INFO).write_text(json.dumps(info, indent=2) + "\n")
        return tuple(self.files[-4:])

    def _add_path(self, name: str) -> Path:
        """Add a name to the dataset's files, and return the path of the new file."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files.append(name)
        return path


def _column(values: NDArray[Any]) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.astype(np.float32, copy=False).ravel()), values.shape[1])


def _feature(values: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": str(values.dtype), "shape": [1 if values.ndim == 1 else values.shape[1]], "names": None}


def _stats(values: NDArray[Any]) -> dict[str, Any]:
    """Return the statistics of an episode, per dimension."""
    wide = values.astype(np.float64).reshape(len(values), -1)
    moments = {"min": wide.min(0), "max": wide.max(0), "mean": wide.mean(0), "std": wide.std(0)}
    return {**{name: value.tolist() for name, value in moments.items()}, "count": [len(values)]}


def _picture_stats(images: NDArray[np.uint8]) -> dict[str, Any]:
    """Return statistics of all pixels per channel, scaled to [0, 1], in LeRobot's shape (3, 1, 1)."""
    pixels = images.reshape(-1, 3)
    wide = {name: getattr(pixels, name)(axis=0) / 255.0 for name in ("min", "max", "mean", "std")}
    return {**{name: value.reshape(3, 1, 1).tolist() for name, value in wide.items()}, "count": [len(images)]}


def _read_stats(row: Mapping[str, Any], name: str) -> dict[str, NDArray[np.float64]]:
    kinds = ("min", "max", "mean", "std", "count")
    return {kind: np.array(row[f"stats/{name}/{kind}"], dtype=np.float64) for kind in kinds}


def _merge_stats(stats: list[dict[str, NDArray[np.float64]]]) -> dict[str, Any]:
    """Merge the statistics of all episodes (Chan, Golub and LeVeque, 1979)."""
    total = sum(item["count"] for item in stats)
    mean = sum(item["mean"] * item["count"] for item in stats) / total
    variance = sum((item["std"] ** 2 + (item["mean"] - mean) ** 2) * item["count"] for item in stats) / total
    lowest, highest = np.min([item["min"] for item in stats], axis=0), np.max([item["max"] for item in stats], axis=0)
    merged = {"min": lowest, "max": highest, "mean": mean, "std": np.sqrt(variance)}
    return {**{name: np.asarray(value).tolist() for name, value in merged.items()}, "count": [int(np.sum(total))]}


def _task_table(tasks: list[str]) -> pa.Table:
    """Return the table of tasks with their numbers, in the form of a pandas table with the task as index."""
    names = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}
        for name, (kind, numpy_type) in names.items()
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({b"pandas": json.dumps(pandas).encode()})
