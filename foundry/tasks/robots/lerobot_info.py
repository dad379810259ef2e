"""Reader of a LeRobot dataset's meta/info.json: version, columns and file paths."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from foundry.config.sources import download_hint
from foundry.core.errors import ConfigError, Violation, as_text, listed, nearest

INFO = "meta/info.json"
_MAX_BYTES = 2**26
_CONVERTER = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 (of the package lerobot)"
_NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")
_PICTURES = ("image", "video")
_MOST_PIXELS = 2**14


@dataclass(frozen=True)
class LeRobotInfo:
    """Metadata of a dataset in version 3 of LeRobot's format.

    Attributes:
        folder: the dataset's folder.
        fps: frames per second.
        features: dtype and shape of each column, by column name; for images also the names of their dimensions.
        data_path, video_path: templates of the paths of data and video files; `video_path` is None if no videos exist.
    """

    folder: Path
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    data_path: str
    video_path: str | None

    def num_values(self, column: str, key: str) -> int:
        """Return how many numbers a column has in each frame.

        Args:
            column: name of the column.
            key: config key that chooses the column, for the message.

        Raises:
            ConfigError: if the column does not exist or does not contain vectors of numbers.
        """
        feature = self._feature(column, key, _NUMBERS)
        shape = feature.get("shape")
        if isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and 1 <= shape[0] <= 10**6:
            return shape[0]
        raise ConfigError(Violation(key, f"is {column}, whose shape is {as_text(shape)}; choose a column of vectors"))

    def picture_size(self, column: str, key: str) -> tuple[int, int]:
        """Return height and width in pixels of a column of images.

        Raises:
            ConfigError: if the column does not exist or does not contain images.
        """
        feature = self._feature(column, key, _PICTURES)
        shape, names = feature.get("shape"), feature.get("names")
        sizes = shape if isinstance(shape, list) and len(shape) == 3 else [0]
        if all(type(size) is int and 1 <= size <= _MOST_PIXELS for size in sizes):
            is_channels_first = sizes[2] not in (1, 3, 4)
            if isinstance(names, list) and len(names) == 3:
                is_channels_first = str(names[0]).startswith("channel")
            return (sizes[1], sizes[2]) if is_channels_first else (sizes[0], sizes[1])
        raise ConfigError(Violation(key, f"is {column}, whose shape is {as_text(shape)}; choose a column of images"))

    def is_video(self, column: str) -> bool:
        """Return whether the images of a column are stored as video files."""
        return bool(self.features[column]["dtype"] == "video")

    def data_file(self, chunk: int, file: int) -> Path:
        """Return the path of a data file with frames.

        Raises:
            ConfigError: if the path leads out of the folder.
        """
        return self._file(self.data_path, chunk_index=chunk, file_index=file)

    def video_file(self, column: str, chunk: int, file: int) -> Path:
        """Return the path of a video file.

        Raises:
            ConfigError: if the path leads out of the folder, or the dataset has no videos.
        """
        return self._file(self.video_path or "", video_key=column, chunk_index=chunk, file_index=file)

    def _feature(self, column: str, key: str, dtypes: tuple[str, ...]) -> Mapping[str, Any]:
        columns = [name for name, feature in self.features.items() if feature["dtype"] in dtypes]
        if column in columns:
            return self.features[column]
        kind = f"a column of {self.features[column]['dtype']}" if column in self.features else "not a column"
        choices = f"it has {listed(columns, 8)}" if columns else "it has no suitable column"
        message = (
            f"is {as_text(column)} but that is {kind} in {self.folder / INFO}{nearest(column, columns)}; {choices}"
        )
        raise ConfigError(Violation(key, message))

    def _file(self, template: str, **values: Any) -> Path:
        """Fill the fields of a path template; only the syntax that LeRobot itself writes is supported."""

        def fill(match: "re.Match[str]") -> str:
            value = values[match[1]]
            return str(value) if match[2] is None else f"{int(value):0{match[2]}d}"

        try:
            name = re.sub(r"\{(\w+)(?::0?(\d)d)?\}", fill, template)
            path = PurePosixPath(name)
            if not name or set(name) & set("{}\0\\") or path.is_absolute() or ".." in path.parts:
                raise ValueError
        except (KeyError, ValueError):
            message = (
                f"is {self.folder}, whose {INFO} has the path {as_text(template)}, which is not a path inside of it"
            )
            raise ConfigError(Violation("data.path", message)) from None
        return self.folder / name


def read_info(path: str) -> LeRobotInfo:
    """Read the metadata of the dataset at `data.path`.

    Raises:
        ConfigError: if there is no LeRobot dataset, or its version is not 3.
    """
    folder = Path(path).expanduser()
    file = folder / INFO
    if not file.is_file():
        message = f"is {as_text(path)}, which has no {INFO}; give the folder of a LeRobot dataset"
        if not folder.is_dir():
            remedy = download_hint(path, of_data=True) or "; give the folder of a LeRobot dataset"
            message = f"is {as_text(path)}, which does not exist{remedy}"
        elif (folder / "meta/info.jsonl").exists() or (folder / "meta_data").exists():
            message = f"is {as_text(path)}, a LeRobot dataset of version 1, which is not supported; "
            message += "record or convert it again"
        raise ConfigError(Violation("data.path", message))
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError("is too large")
        content = json.loads(file.read_bytes())
        return _parse(folder, content)
    except (OSError, ValueError, RecursionError) as error:
        reason = "is not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeError, RecursionError)) else error
        raise ConfigError(Violation("data.path", f"is {as_text(path)}, whose {INFO} {reason}")) from None


def _parse(folder: Path, content: Any) -> LeRobotInfo:
    """Parse the entries of meta/info.json that foundry uses.

    Raises:
        ValueError: if an entry is invalid; the error's text completes a sentence about the file.
    """
    if not isinstance(content, dict):
        raise ValueError("contains no JSON object")
    version = content.get("codebase_version")
    if not isinstance(version, str) or not version.startswith("v3"):
        reason = f"is of version {as_text(version)}, not v3"
        raise ValueError(f"{reason}; convert it with {_CONVERTER}" if str(version).startswith("v2") else reason)
    fps, features = content.get("fps"), content.get("features")
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0 < fps < 10**6:
        raise ValueError(f"has fps={as_text(fps)}, which is not a frame rate")
    if not isinstance(features, dict) or not all(
        isinstance(feature, dict) and isinstance(feature.get("dtype"), str) for feature in features.values()
    ):
        raise ValueError("has features without a dtype")
    data_path, video_path = content.get("data_path"), content.get("video_path")
    if not isinstance(data_path, str) or not isinstance(video_path, str | None):
        raise ValueError("has a data_path or video_path that is not a string")
    return LeRobotInfo(folder, float(fps), features, data_path, video_path)
