"""LeRobot format version 3: read exactly, from any writer, and refused if incomplete."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.lerobot_parts import CAMERA, FPS, LENGTHS, SIZE, recorded, smooth_picture, write_by_hand

from foundry.core.errors import ConfigError
from foundry.tasks.robots.data.episodes import held_out_episodes
from foundry.tasks.robots.data.lerobot import _read_episodes, lerobot, read_recording
from foundry.tasks.robots.data.lerobot_writing import ACTION_KEY, IMAGE_KEY, STATE_KEY, Episode, write_lerobot
from foundry.tasks.robots.data.statistics import statistics_of
from foundry.tasks.robots.lerobot_info import LeRobotInfo, read_info

HAS_AV = importlib.util.find_spec("av") is not None
needs_av = pytest.mark.skipif(not HAS_AV, reason="needs av, of the extra video")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "recorded"
    made.mkdir()
    return made


def read(folder, tmp_path, **changed):
    settings = {"state_key": STATE_KEY, "action_key": ACTION_KEY, "pictures": None}
    return read_recording(read_info(str(folder)), cache_dir=str(tmp_path / "cache"), **settings | changed)


def test_hand_written_lerobot_folder_is_read_exactly(folder, tmp_path):
    state, actions, _ = write_by_hand(folder)
    recording = read(folder, tmp_path)
    assert recording.state.dtype == recording.actions.dtype == np.float32
    assert np.array_equal(recording.state, state)
    assert np.array_equal(recording.actions, actions)
    assert recording.lengths.tolist() == list(LENGTHS)
    assert recording.images is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("kind", "times"), [("image", 1), pytest.param("video", 4, marks=needs_av)])
def test_folder_written_by_lerobot_is_read(kind, times, tmp_path):
    stored = Path(__file__).parents[2] / "stored" / "lerobot-0.4.4" / kind  # Made by tests/stored/write_lerobot.py.
    state, actions, pictures = recorded()
    recording = read(stored, tmp_path, pictures=(CAMERA, times * SIZE))
    assert np.array_equal(recording.state, state)
    assert np.array_equal(recording.actions, actions)
    assert recording.lengths.tolist() == list(LENGTHS)
    shown = pictures.repeat(times, axis=1).repeat(times, axis=2).astype(int)
    error = np.abs(recording.images.transpose(0, 2, 3, 1) - shown)
    assert error.max() == 0 if kind == "image" else error.mean(axis=(1, 2, 3)).max() < 3


def test_images_in_rows_are_decoded_exactly_and_cached(folder, tmp_path):
    _, _, pictures = write_by_hand(folder, kind="image")
    recording = read(folder, tmp_path, pictures=(CAMERA, SIZE))
    assert isinstance(recording.images, np.memmap)
    assert np.array_equal(recording.images.transpose(0, 2, 3, 1), pictures)
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.npy")}
    again = read(folder, tmp_path, pictures=(CAMERA, SIZE))
    assert kept == {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.npy")}
    assert again.source == recording.source
    small = read(folder, tmp_path, pictures=(CAMERA, 8))
    halves = pictures.reshape(-1, 8, 2, 8, 2, 3).mean(axis=(2, 4)).transpose(0, 3, 1, 2)
    assert small.images.shape == (sum(LENGTHS), 3, 8, 8)
    assert np.abs(small.images[:, :, 1:-1, 1:-1] - halves[:, :, 1:-1, 1:-1]).mean() < 2
    assert small.source != recording.source


@needs_av
def test_video_frames_are_matched_to_rows_by_timestamp(folder, tmp_path):
    _, _, pictures = write_by_hand(folder, kind="video")
    images = read(folder, tmp_path, pictures=(CAMERA, SIZE)).images
    assert np.abs(images.transpose(0, 2, 3, 1).astype(int) - pictures).mean(axis=(1, 2, 3)).max() < 3


@needs_av
def test_row_without_a_matching_video_frame_is_refused(folder, tmp_path):
    write_by_hand(folder, kind="video")
    late = folder / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(late)
    name = f"videos/{CAMERA}/from_timestamp"
    moved = pa.array([second + 0.04 for second in table[name].to_pylist()])
    pq.write_table(table.set_column(table.column_names.index(name), name, moved), late)
    with pytest.raises(ConfigError, match=r"has no video frame at second 0\.\d+ of file-003\.mp4"):
        read(folder, tmp_path, pictures=(CAMERA, SIZE))


def test_videos_without_av_installed_name_the_extra(folder, tmp_path, monkeypatch):
    write_by_hand(folder, kind="image")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "av", None)
        info = json.loads((folder / "meta/info.json").read_text())
        info["features"][CAMERA]["dtype"] = "video"
        (folder / "meta/info.json").write_text(json.dumps(info))
        for file in (folder / "meta/episodes").rglob("*.parquet"):
            rows = pq.read_table(file).to_pylist()
            own = {f"videos/{CAMERA}/{name}": 0 for name in ("chunk_index", "file_index", "from_timestamp")}
            pq.write_table(pa.Table.from_pylist([row | own for row in rows]), file)
        video = folder / f"videos/{CAMERA}/chunk-000/file-000.mp4"
        video.parent.mkdir(parents=True)
        video.touch()
        with pytest.raises(ConfigError, match=r"data\.image_key: .*pip install '?av"):
            read(folder, tmp_path, pictures=(CAMERA, SIZE))


def record(lengths, *, with_images=True):
    draw, episodes, first = np.random.default_rng(1), [], 0
    for number, length in enumerate(lengths):
        images = np.stack([smooth_picture(first + frame) for frame in range(length)]) if with_images else None
        state, actions = (draw.normal(size=(length, dims)).astype(np.float32) for dims in (4, 2))
        episodes.append(Episode(state=state, actions=actions, task=f"task {number % 2}", images=images))
        first += length
    return episodes


@pytest.mark.parametrize("with_images", [False, True])
def test_written_lerobot_folder_is_read_back_exactly_over_several_files(with_images, folder, tmp_path):
    episodes = record([4, 1, 6, 2, 3], with_images=with_images)
    names = write_lerobot(folder, episodes, fps=FPS, robot_type="arm", file_bytes=1, files_per_chunk=2)
    assert sorted(names) == sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert (folder / "data/chunk-002/file-000.parquet").is_file()
    recording = read(folder, tmp_path, pictures=(IMAGE_KEY, SIZE) if with_images else None)
    assert np.array_equal(recording.state, np.concatenate([episode.state for episode in episodes]))
    assert np.array_equal(recording.actions, np.concatenate([episode.actions for episode in episodes]))
    assert recording.lengths.tolist() == [4, 1, 6, 2, 3]
    if with_images:
        written = np.concatenate([episode.images for episode in episodes])
        assert np.array_equal(recording.images.transpose(0, 2, 3, 1), written)


@needs_av
def test_written_video_is_read_back_within_two_gray_levels(folder, tmp_path):
    draw, episodes = np.random.default_rng(1), []
    down, right = np.mgrid[0:64, 0:64]
    for length in (4, 7):
        grey = [((down + right + 5 * frame) % 256).astype(np.uint8) for frame in range(length)]
        images = np.stack([np.stack([one] * 3, axis=-1) for one in grey])
        state, actions = (draw.normal(size=(length, 2)).astype(np.float32) for _ in range(2))
        episodes.append(Episode(state=state, actions=actions, images=images))
    write_lerobot(folder, episodes, fps=FPS, robot_type="arm", as_video=True)
    images = read(folder, tmp_path, pictures=(IMAGE_KEY, 64)).images
    written = np.concatenate([episode.images for episode in episodes])
    assert np.abs(images.transpose(0, 2, 3, 1).astype(int) - written).mean() < 2


def test_written_lerobot_metadata_follows_the_format(folder):
    episodes = record([4, 6, 2])
    write_lerobot(folder, episodes, fps=12.5, robot_type="arm")
    info = json.loads((folder / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 12.5, "arm")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 12, 2)
    assert info["features"][IMAGE_KEY] == {
        "dtype": "image",
        "shape": [SIZE, SIZE, 3],
        "names": ["height", "width", "channels"],
    }
    rows = pq.read_table(folder / info["data_path"].format(chunk_index=0, file_index=0)).to_pylist()
    assert [row["index"] for row in rows] == list(range(12))
    assert [row["frame_index"] for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]
    assert rows[5]["timestamp"] == pytest.approx(1 / 12.5)
    found = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in found] == [(0, 4), (4, 10), (10, 12)]
    assert [row["tasks"] for row in found] == [["task 0"], ["task 1"], ["task 0"]]
    tasks = pq.read_table(folder / "meta/tasks.parquet").to_pylist()
    assert tasks == [{"task_index": 0, "task": "task 0"}, {"task_index": 1, "task": "task 1"}]
    stats = json.loads((folder / "meta/stats.json").read_text())
    actions = np.concatenate([episode.actions for episode in episodes]).astype(np.float64)
    assert np.allclose(stats["action"]["mean"], actions.mean(0))
    assert np.allclose(stats["action"]["std"], actions.std(0))
    pixels = np.concatenate([episode.images for episode in episodes]).reshape(-1, 3) / 255
    assert np.allclose(np.ravel(stats[IMAGE_KEY]["std"]), pixels.std(0))


SIZES = {"state_dim": 3, "action_dim": 2, "image_size": None, "image_key": None}


def splits(folder, tmp_path, **changed):
    settings = {"state_key": STATE_KEY, "action_key": ACTION_KEY, "num_observations": 2, "horizon": 4, "held_out": 0.3}
    cache = str(tmp_path / "cache")
    return lerobot(seed=0, path=str(folder), cache_dir=cache, **settings | SIZES | changed)


def test_lerobot_statistics_are_computed_from_training_episodes(folder, tmp_path):
    state, actions, _ = write_by_hand(folder)
    data = splits(folder, tmp_path)
    of_train = np.repeat(~held_out_episodes(len(LENGTHS), 0.3), LENGTHS)
    assert np.allclose(statistics_of(data).state.mean, state[of_train].mean(0))
    assert np.array_equal(statistics_of(data).actions.max, actions[of_train].max(0).astype(np.float64))
    assert (len(data.train), len(data.validation)) == (of_train.sum(), (~of_train).sum())


def test_image_settings_change_the_lerobot_fingerprint(folder, tmp_path):
    write_by_hand(folder, kind="image")
    plain = splits(folder, tmp_path).fingerprint
    seen = {size: splits(folder, tmp_path, image_key=CAMERA, image_size=size) for size in (8, SIZE)}
    assert len({plain, *(data.fingerprint for data in seen.values())}) == 3
    assert seen[8].train[0]["images"].shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_dim": 4}, r"data\.state_dim: is 4 but observation\.state of .* has 3 numbers; leave it out"),
        ({"action_dim": 1}, r"data\.action_dim: is 1 but action of .* has 2 numbers"),
        ({"state_key": "observation.stat"}, r"data\.state_key: .*did you mean observation\.state\?"),
        ({"action_key": "nothing"}, r"data\.action_key: is nothing but that is not a column .* it has .*action"),
    ],
)
def test_wrong_lerobot_columns_or_sizes_are_named(settings, message, folder, tmp_path):
    write_by_hand(folder)
    with pytest.raises(ConfigError, match=message):
        splits(folder, tmp_path, **settings)


def version(text):
    return lambda info: info.update(codebase_version=text)


def path(text, name="data_path"):
    return lambda info: info.update({name: text})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (version("v2.1"), r"is of version v2\.1, not v3; convert it with .*convert_dataset_v21_to_v30"),
        (version("v2.0"), "convert_dataset_v21_to_v30"),
        (version("v9"), "is of version v9, not v3$"),
        (version(3), "is of version 3, not v3"),
        (lambda info: info.pop("features"), "features without a dtype"),
        (lambda info: info.update(fps="fast"), "fps=fast, which is not a frame rate"),
        (lambda info: info.update(fps=0), "fps=0"),
        (path(7), "not a string"),
        (path("/etc/passwd"), "not a path inside of it"),
        (path("data/../../{chunk_index:03d}.parquet"), "not a path inside of it"),
        (path("{chunk_index.__class__}"), "not a path inside of it"),
        (path("{chunk_index:999999999d}"), "not a path inside of it"),
        (path("{secret}"), "not a path inside of it"),
        (path(""), "not a path inside of it"),
    ],
)
def test_other_lerobot_version_or_path_outside_the_folder_is_refused(change, message, folder, tmp_path):
    write_by_hand(folder, change_info=change)
    with pytest.raises(ConfigError, match=message):
        read(folder, tmp_path)


def test_video_path_outside_the_folder_is_refused(folder, tmp_path):
    write_by_hand(folder, kind="image", change_info=path("../{video_key}.mp4", "video_path"))
    info = read_info(str(folder))
    with pytest.raises(ConfigError, match="not a path inside of it"):
        info.video_file(CAMERA, 0, 0)


def first_data_file(folder):
    return folder / "data/chunk-000/file-000.parquet"


def rewrite(file, change):
    pq.write_table(pa.Table.from_pylist(change(pq.read_table(file).to_pylist())), file)


DAMAGES = {
    "no info": (lambda f: (f / "meta/info.json").unlink(), "has no meta/info.json"),
    "info is no json": (lambda f: (f / "meta/info.json").write_text("{"), "is not JSON"),
    "a data file is missing": (
        lambda f: first_data_file(f).unlink(),
        r"has data/chunk-000/file-000\.parquet, which cannot be read: No such file or directory",
    ),
    "a data file is cut": (lambda f: first_data_file(f).write_bytes(b"PAR1"), "cannot be read"),
    "a row is missing": (
        lambda f: rewrite(first_data_file(f), lambda rows: rows[:-1]),
        r"has 13 frames in its data files but 14 in meta/episodes",
    ),
    "a row is there twice": (
        lambda f: rewrite(first_data_file(f), lambda rows: [*rows[:-1], rows[0]]),
        r"has no frame 0 of episode 0 in its data files",
    ),
    "a row too many": (lambda f: rewrite(first_data_file(f), lambda rows: [*rows, rows[0]]), "has a duplicate frame"),
    "an unknown episode": (
        lambda f: rewrite(first_data_file(f), lambda rows: [*rows[:-1], rows[-1] | {"episode_index": 70}]),
        "meta/episodes does not contain",
    ),
    "a short vector": (
        lambda f: rewrite(first_data_file(f), lambda rows: [*rows[:-1], rows[-1] | {"action": [1.0]}]),
        "rows of action that do not have 2 numbers",
    ),
    "a missing vector": (
        lambda f: rewrite(first_data_file(f), lambda rows: [*rows[:-1], rows[-1] | {"observation.state": None}]),
        "rows of observation.state that do not have 3 numbers",
    ),
    "texts": (
        lambda f: rewrite(first_data_file(f), lambda rows: [row | {"action": ["a", "b"]} for row in rows]),
        "rows of action that are not numbers",
    ),
    "no column": (
        lambda f: rewrite(first_data_file(f), lambda rows: [{"action": row["action"]} for row in rows]),
        r"has no column episode_index in data/chunk-000/file-000\.parquet",
    ),
    "episodes are missing": (
        lambda f: (f / "meta/episodes/chunk-000/file-001.parquet").unlink(),
        "which are not numbered consecutively from 0",
    ),
    "episodes are a pipe": (
        lambda f: os.mkfifo(f / "meta/episodes/chunk-000/file-009.parquet"),
        r"has meta/episodes/chunk-000/file-009\.parquet, which cannot be read: is a named pipe",
    ),
    "episodes are a device": (
        lambda f: (f / "meta/episodes/chunk-000/file-009.parquet").symlink_to("/dev/zero"),
        r"has meta/episodes/chunk-000/file-009\.parquet, which cannot be read: is a device",
    ),
    "a data file is a pipe": (
        lambda f: (first_data_file(f).unlink(), os.mkfifo(first_data_file(f))),
        r"has data/chunk-000/file-000\.parquet, which cannot be read: is a named pipe",
    ),
    "no episodes": (lambda f: [e.unlink() for e in (f / "meta/episodes").rglob("*.parquet")], "has no episodes"),
    "an endless episode": (
        lambda f: rewrite(
            f / "meta/episodes/chunk-000/file-000.parquet", lambda rows: [row | {"length": 2**40} for row in rows]
        ),
        "frames in its data files",
    ),
    "an empty episode": (
        lambda f: rewrite(
            f / "meta/episodes/chunk-000/file-000.parquet", lambda rows: [row | {"length": 0} for row in rows]
        ),
        "has no frame in episode 2",
    ),
}


WRONG_COLUMNS = {
    "text": lambda count: pa.array(["a"] * count),
    "numbers as text": lambda count: pa.array(["1"] * count),
    "lists": lambda count: pa.array([[1]] * count),
    "structs": lambda count: pa.array([{"a": 1}] * count),
    "nan": lambda count: pa.array([float("nan")] * count),
    "infinity": lambda count: pa.array([float("inf")] * count),
    "negative": lambda count: pa.array([-1] * count),
    "missing": lambda count: pa.nulls(count, pa.int64()),
    "2**62": lambda count: pa.array([2**62] * count),
    "2**63": lambda count: pa.array([2**63] * count, pa.uint64()),
    "booleans": lambda count: pa.array([True] * count),
    "times": lambda count: pa.array([1] * count, pa.timestamp("s")),
    "bytes": lambda count: pa.array([b"a"] * count),
    "decimals": lambda count: pa.array([1] * count).cast(pa.decimal128(20)),
}
PLACES = ["episode_index", "length", "data/chunk_index", "data/file_index"]
PLACES += [f"videos/{CAMERA}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("values", WRONG_COLUMNS)
def test_invalid_values_in_the_episodes_table_are_refused(name, values, folder):
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    columns = {place: pa.array([0, 1]) for place in PLACES} | {name: WRONG_COLUMNS[values](2)}
    pq.write_table(pa.table(columns), folder / "meta/episodes/chunk-000/file-000.parquet")
    info = LeRobotInfo(folder, 10.0, {}, "data.parquet", "video.mp4")
    with pytest.raises(ConfigError) as refused:
        _read_episodes(info, CAMERA)
    (violation,) = refused.value.violations
    assert violation.key == "data.path"
    assert name in str(violation)
    assert "meta/episodes" in str(violation)
    assert str(violation).isprintable()


@pytest.mark.parametrize("name", ["length", "data/chunk_index"])
def test_duplicate_column_of_the_episodes_table_is_refused(name, folder, tmp_path):
    write_by_hand(folder)
    file = folder / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.append_column(name, table[name]), file)
    with pytest.raises(ConfigError, match=f"cannot be read: it has 2 columns '{name}'"):
        read(folder, tmp_path)


@pytest.mark.parametrize("template", ["x" * 100_000, "x/" * 50_000 + "y", "x" * 300 + "/{chunk_index:03d}"])
def test_invalid_path_template_is_a_short_config_error(template, folder, tmp_path):
    write_by_hand(folder, change_info=path(template))
    with pytest.raises(ConfigError, match=r"^data\.path: is ") as refused:
        read(folder, tmp_path)
    assert len(str(refused.value)) <= 400


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_lerobot_folder_is_a_one_line_config_error(damage, folder, tmp_path):
    write_by_hand(folder)
    harm, message = DAMAGES[damage]
    harm(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        read(folder, tmp_path)
    (violation,) = caught.value.violations
    assert violation.key == "data.path"
    assert "\n" not in str(violation)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no picture", "is not an image"),
        (None, "without an image"),
    ],
)
def test_row_without_a_valid_image_is_refused(content, message, folder, tmp_path):
    write_by_hand(folder, kind="image")
    cell = {"bytes": content, "path": "/etc/passwd"}
    rewrite(first_data_file(folder), lambda rows: [*rows[:-1], rows[-1] | {CAMERA: cell}])
    with pytest.raises(ConfigError, match=message):
        read(folder, tmp_path, pictures=(CAMERA, SIZE))


def test_image_of_another_size_is_refused_before_decoding(folder, tmp_path):
    def smaller(info):
        info["features"][CAMERA]["shape"] = [8, 8, 3]

    write_by_hand(folder, kind="image", change_info=smaller)
    with pytest.raises(ConfigError, match="is 16 by 16 pixels, not 8 by 8"):
        read(folder, tmp_path, pictures=(CAMERA, SIZE))
