"""A LeRobot v3 dataset, written from the format specification without foundry's code."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

LENGTHS = (3, 5, 2, 4)
FPS, SIZE = 10, 16
CAMERA = "observation.images.front"


def smooth_picture(number):
    """Return a (SIZE, SIZE, 3) uint8 gradient, distinct for each number."""
    down, right = np.mgrid[0:SIZE, 0:SIZE] * (200 // SIZE)
    return np.stack([down, right, np.full_like(down, 10 * number)], axis=-1).astype(np.uint8)


def recorded():
    """Return state (frames, 3), actions (frames, 2) and images (frames, SIZE, SIZE, 3) of all episodes."""
    draw, frames = np.random.default_rng(0), sum(LENGTHS)
    state = draw.normal(size=(frames, 3)).astype(np.float32)
    actions = draw.normal(size=(frames, 2)).astype(np.float32)
    return state, actions, np.stack([smooth_picture(number) for number in range(frames)])


def write_by_hand(folder, *, kind=None, change_info=None):
    """Write four episodes into two data files in two chunks, with rows out of order; return the recorded arrays.

    Args:
        folder: an empty folder.
        kind: storage of images: None, image or video; two episodes share a video file.
        change_info: called with the content of info.json before it is written.
    """
    (state, actions, pictures), frames = recorded(), sum(LENGTHS)
    episode = np.repeat(range(len(LENGTHS)), LENGTHS)
    starts = np.cumsum(LENGTHS) - LENGTHS
    frame = np.arange(frames) - starts[episode]
    columns = {
        "observation.state": pa.array(state.tolist(), pa.list_(pa.float32())),
        "action": pa.array(actions.tolist(), pa.list_(pa.float32(), 2)),
        "next.done": pa.array([False] * frames),
        "timestamp": pa.array((frame / FPS).astype(np.float32)),
        "frame_index": pa.array(frame),
        "episode_index": pa.array(episode),
        "index": pa.array(np.arange(frames)),
        "task_index": pa.array(episode % 2),
    }
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    }
    if kind is not None:
        names = ["height", "width", "channels"]
        features[CAMERA] = {"dtype": kind, "shape": [SIZE, SIZE, 3], "names": names}
    if kind == "image":
        cells = [{"bytes": _png(picture), "path": "/etc/passwd"} for picture in pictures]
        columns[CAMERA] = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    files = [(0, 0, (0, 1)), (1, 3, (2, 3))]
    table, rows = pa.table(columns), []
    for chunk, file, members in files:
        indices = np.flatnonzero(np.isin(episode, members))
        _write(table.take(indices[::-1]), folder / f"data/chunk-{chunk:03d}/file-{file:03d}.parquet", row_group_size=2)
        if kind == "video":
            _write_video(pictures[indices], folder / f"videos/{CAMERA}/chunk-{chunk:03d}/file-{file:03d}.mp4")
        for number in members:
            place = {"chunk_index": chunk, "file_index": file}
            row = {"episode_index": number, "tasks": [f"task {number % 2}"], "length": LENGTHS[number]}
            row |= {f"data/{name}": value for name, value in place.items()}
            row |= {"stats/action/mean": [9e9, 9e9], "dataset_from_index": int(starts[number])}
            if kind == "video":
                began = (starts[number] - starts[members[0]]) / FPS
                place |= {"from_timestamp": began, "to_timestamp": began + LENGTHS[number] / FPS}
                row |= {f"videos/{CAMERA}/{name}": value for name, value in place.items()}
            rows.append(row)
    for number, part in enumerate((rows[2:], rows[:2])):
        _write(pa.Table.from_pylist(part), folder / f"meta/episodes/chunk-000/file-{number:03d}.parquet")
    _write(pa.table({"task_index": [1, 0], "task": ["task 1", "task 0"]}), folder / "meta/tasks.parquet")
    info = {
        "codebase_version": "v3.0",
        "robot_type": "so100",
        "fps": FPS,
        "total_episodes": 99,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features,
    }
    if change_info is not None:
        change_info(info)
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/stats.json").write_text('{"action": {"mean": [9e9, 9e9]}}')
    return state, actions, pictures


def _write(table, file, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, **options)


def _png(picture):
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, format="PNG")
    return stream.getvalue()


def _write_video(pictures, file):
    import av

    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = SIZE, SIZE, "yuv444p"
        stream.options = {"crf": "5", "g": "2"}
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
