import os
import stat

import pytest

from foundry.run_dir import files
from foundry.run_dir.files import (
    UnsafeFileError,
    in_hub_cache,
    inside,
    make_folder,
    open_regular,
    read_text,
    write_atomically,
)


def make_link(path):
    target = path.with_name("target")
    target.write_text("precious")
    path.symlink_to(target)


def make_dangling_link(path):
    path.symlink_to(path.with_name("nowhere"))


SPECIAL = {
    "a symbolic link": make_link,
    "a symbolic link to nothing": make_dangling_link,
    "a named pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)),  # /dev/zero
}


@pytest.fixture(params=SPECIAL)
def special(request, tmp_path):
    path = tmp_path / "file"
    try:
        SPECIAL[request.param](path)
    except PermissionError:
        pytest.skip("only root makes devices")
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize("mode", ["r", "rb", "w", "a"])
def test_open_regular_rejects_special_files_without_blocking(special, mode):
    with pytest.raises(UnsafeFileError, match=f"{special} is .*, not a regular file"):
        open_regular(special, mode)
    assert not special.with_name("nowhere").exists()
    target = special.with_name("target")
    assert not target.exists() or target.read_text() == "precious"


@pytest.mark.timeout(20)
def test_atomic_write_replaces_a_link_rather_than_its_target(tmp_path):
    make_link(tmp_path / "file")
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "file").is_symlink()
    assert read_text(tmp_path / "file") == "new"


def test_atomic_write_replaces_a_link_at_its_temporary_path(tmp_path):
    make_link(tmp_path / f".file.{os.getpid()}.partial")
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "target").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "target"]


def test_atomic_write_sets_permissions(tmp_path):
    write_atomically(tmp_path / "secret", "x", permissions=0o600)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_failed_atomic_write_keeps_the_old_file_and_leaves_no_others(tmp_path):
    write_atomically(tmp_path / "file", "old")

    def fail():
        with files.replaced_atomically(tmp_path / "file") as file:
            file.write(b"half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert read_text(tmp_path / "file") == "old"


def test_read_text_rejects_oversized_files(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UnsafeFileError, match="larger than"):
        read_text(tmp_path / "file")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "link/x", "nul\0"])
def test_inside_rejects_paths_out_of_the_folder(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="leads out of"):
        inside(folder, name)
    assert inside(folder, "plots/loss.png") == folder / "plots/loss.png"


def test_make_folder_requires_an_existing_parent_by_default(tmp_path):
    make_folder(tmp_path / "plots")
    assert make_folder(tmp_path / "plots").is_dir()
    with pytest.raises(FileNotFoundError):
        make_folder(tmp_path / "gone" / "plots")
    assert not (tmp_path / "gone").exists()
    assert make_folder(tmp_path / "new" / "run", parents=True).is_dir()


@pytest.mark.parametrize(
    ("create", "kind"),
    [
        (lambda path: path.symlink_to("elsewhere"), "a symbolic link"),
        (lambda path: path.symlink_to("missing"), "a symbolic link"),
        (lambda path: path.write_text("kept"), "a file"),
        (os.mkfifo, "a named pipe"),
    ],
)
@pytest.mark.parametrize("parents", [False, True])
def test_make_folder_rejects_paths_that_are_not_folders(tmp_path, create, kind, parents):
    (tmp_path / "elsewhere").mkdir()
    create(tmp_path / "plots")
    with pytest.raises(UnsafeFileError, match=f"is {kind}, not a folder; remove it"):
        make_folder(tmp_path / "plots", parents=parents)


def test_in_hub_cache_follows_only_links_to_blobs_of_the_cache(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "0a1b", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00").write_text("kept")
    (tmp_path / "other").write_text("of somebody")
    (snapshot / "own.json").symlink_to("../../blobs/f00")
    (snapshot / "away.json").symlink_to(tmp_path / "other")
    (blobs / "own.json").symlink_to("f00")
    assert in_hub_cache(snapshot / "own.json") == blobs / "f00"
    for path in (snapshot / "away.json", snapshot / "absent.json", blobs / "own.json"):
        assert in_hub_cache(path) == path
