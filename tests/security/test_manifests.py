"""Untrusted checkpoints: file names in the manifest, and special files in the checkpoint folder."""

import json
import os

import pytest
from support.checkpoint_parts import ALONE, Net, rewrite_manifest, write

from foundry.checkpoint.folder import problems, read_manifest
from foundry.checkpoint.resume_point import find_resume_point
from foundry.checkpoint.retention import remove_leftovers
from foundry.core.errors import ConfigError
from foundry.run_dir.checkpoints import BEST, LATEST, MANIFEST, find, list_checkpoints

SHARD, RANK = "shard-00000.safetensors", "rank-00000.json"


NAMES = [
    "../outside",
    "/dev/zero",
    "/etc/passwd",
    "..",
    ".",
    "",
    ".hidden",
    "sub/file",
    "a\0b",
    "a\\b",
    MANIFEST,
    "../" * 40 + "dev/zero",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 10, 2**62])
def test_manifest_rejects_file_names_outside_the_checkpoint(tmp_path, name, size):
    folder = write(tmp_path, 1, Net(1))
    files = json.loads((folder / MANIFEST).read_text())["files"]
    rewrite_manifest(folder, files={**files, name: {"bytes": size, "checksum": "0"}})
    (problem,) = problems(folder)
    assert repr(name) in problem
    with pytest.raises(ConfigError, match="not a file of a checkpoint"):
        find_resume_point("auto", tmp_path, ALONE)
    assert list_checkpoints(tmp_path) == [folder], "nothing is renamed"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [SHARD, RANK, MANIFEST, "extra.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "zero", "link", "dangling", "folder"])
def test_special_files_in_a_checkpoint_are_rejected_without_blocking(tmp_path, name, kind):
    write(tmp_path, 1, Net(1))
    folder = write(tmp_path, 2, Net(2))
    path, secret = folder / name, tmp_path / "secret"
    secret.write_bytes(path.read_bytes() if path.exists() else b"secret")
    path.unlink(missing_ok=True)
    {
        "pipe": lambda: os.mkfifo(path),
        "zero": lambda: path.symlink_to("/dev/zero"),
        "link": lambda: path.symlink_to(secret),
        "dangling": lambda: path.symlink_to(tmp_path / "nothing"),
        "folder": path.mkdir,
    }[kind]()
    (problem,) = problems(folder)
    assert name in problem
    with pytest.raises(ConfigError, match=name):
        find_resume_point("auto", tmp_path, ALONE)
    assert [found.name for found in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000001"]


BAD_CONTENT = [
    {"step": "1"},
    {"files": []},
    {"files": {SHARD: []}},
    {"files": {SHARD: {"bytes": "many", "checksum": "0"}}},
    {"files": {SHARD: {"checksum": "0"}}},
    {"state": []},
    {"config": "x"},
    {"world_size": "2"},
    {"versions": 1},
    {"format": "1"},
]


@pytest.mark.parametrize("changes", BAD_CONTENT, ids=str)
def test_malformed_manifest_with_valid_checksum_is_an_error(tmp_path, changes):
    folder = write(tmp_path, 1, Net(1))
    rewrite_manifest(folder, **changes)
    (problem,) = problems(folder)
    assert MANIFEST in problem
    with pytest.raises(ConfigError, match=MANIFEST):
        find_resume_point("auto", tmp_path, ALONE)
    assert list_checkpoints(tmp_path) == [folder]


def test_deeply_nested_manifest_is_rejected(tmp_path):
    folder = write(tmp_path, 1, Net(1))
    (folder / MANIFEST).write_text("[" * 200_000)
    assert "not a manifest" in problems(folder)[0]


@pytest.mark.parametrize("target", ["../../elsewhere", "..", "/", "step_00000009", "latest", "step_1", "x"])
def test_latest_and_best_links_out_of_the_folder_are_ignored(tmp_path, target):
    folder = write(tmp_path / "run", 1, Net(1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (LATEST, BEST):
        (folder.parent / name).unlink(missing_ok=True)
        (folder.parent / name).symlink_to(target)
    assert find(tmp_path / "run") == folder.resolve()
    with pytest.raises(FileNotFoundError, match="no checkpoint 'best'"):
        find(tmp_path / "run", "best")


def test_symlinked_checkpoints_folder_is_read_but_not_written(tmp_path):
    folder = write(tmp_path / "theirs", 1, Net(1))
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "checkpoints").symlink_to(folder.parent)
    assert read_manifest(find(tmp_path / "ours")).step == 1
    for resume in ("auto", "never"):
        with pytest.raises(ConfigError, match="checkpoints is a symbolic link"):
            find_resume_point(resume, tmp_path / "ours", ALONE)
    assert find_resume_point(str(tmp_path / "ours"), tmp_path / "new", ALONE).manifest.step == 1


def test_remove_leftovers_does_not_follow_links(tmp_path):
    write(tmp_path, 1, Net(1))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("kept")
    (tmp_path / "checkpoints" / ".step_00000005.partial").symlink_to(theirs)
    (tmp_path / "checkpoints" / ".step_00000006.removed").write_text("a file")
    remove_leftovers(tmp_path)
    assert (theirs / "file").read_text() == "kept"
    assert not list((tmp_path / "checkpoints").glob(".step_*"))
