"""Special files named by a user are refused at once; symlinks to regular files are followed."""

import os
import socket

import pytest

from foundry.config.schemas.data import PictureFit
from foundry.data.images.pictures import read_picture, video_frames
from foundry.data.io.file_digests import file_digests
from foundry.data.io.files import open_bytes, open_table
from foundry.run_dir.files import UnsafeFileError, require_regular


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a socket": make_socket,
}
READERS = {
    "x.png": lambda path: read_picture(path, size=8, channels=3, fit=PictureFit.stretch),
    "x.mp4": lambda path: next(video_frames(path)),
    "x.jsonl": open_bytes,
    "x.jsonl.gz": open_bytes,
    "x.jsonl.zst": open_bytes,
    "x.parquet": lambda path: open_table(path).__enter__(),
    "x.arrow": lambda path: open_table(path).__enter__(),
    "x.csv": lambda path: open_table(path).__enter__(),
    "x": lambda path: file_digests([path]),
    "y": require_regular,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_special_file_is_refused_by_each_reader(name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("foundry.data.images.pictures.import_av", lambda: pytest.importorskip("av"))
    monkeypatch.chdir(tmp_path)  # The path of a socket must be short.
    path = tmp_path / name
    KINDS[kind](path.relative_to(tmp_path) if kind == "a socket" else path)
    with pytest.raises(UnsafeFileError, match=f"is {kind}, not a regular file"):
        READERS[name](path)


def test_symlink_to_a_regular_file_is_followed(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert require_regular(tmp_path / "link") == tmp_path / "link"
    assert file_digests([tmp_path / "link"]) == file_digests([tmp_path / "file"])
    with pytest.raises(FileNotFoundError):
        require_regular(tmp_path / "missing")
