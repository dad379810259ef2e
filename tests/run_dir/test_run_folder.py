"""A run directory that somebody deletes, moves, empties or replaces while a run writes into it."""

import shutil

import pytest

from foundry.run_dir.folder import RunFolder


@pytest.fixture
def run_dir(tmp_path):
    return fill(tmp_path / "run")


def fill(path):
    path.mkdir()
    (path / "config.yaml").write_text("a: 1")
    return path


@pytest.fixture
def folder(run_dir):
    folder = RunFolder(run_dir, marker="config.yaml")
    folder.refill = lambda path: (path / "config.yaml").write_text("again")
    yield folder
    folder.close()


def stranger(run_dir):
    shutil.rmtree(run_dir)
    fill(run_dir)


def strange_file(run_dir):
    shutil.rmtree(run_dir)
    run_dir.write_text("a file")


def strange_link(run_dir):
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.symlink_to(run_dir.parent)


def moved_and_linked(run_dir):
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.symlink_to("moved")


def emptied(run_dir):
    (run_dir / "config.yaml").unlink()


def emptied_anew(run_dir):
    shutil.rmtree(run_dir)
    run_dir.mkdir()


LOST = {
    "deleted": (shutil.rmtree, "run"),
    "moved": (lambda path: path.rename(path.with_name("moved")), "run"),
    "made anew and empty": (emptied_anew, "run"),
    "emptied": (emptied, "run"),
    "another run": (stranger, "run.rescued"),
    "a file": (strange_file, "run.rescued"),
    "a link": (strange_link, "run.rescued"),
}


@pytest.mark.parametrize("how", LOST)
def test_another_is_made_and_said_once(tmp_path, run_dir, folder, how, caplog):
    assert folder.ensure() == run_dir
    lose, name = LOST[how]
    lose(run_dir)
    fresh = folder.ensure()
    assert fresh == tmp_path / name
    assert (fresh / "config.yaml").read_text() == "again"
    assert folder.ensure() == folder.path == fresh
    assert folder.times_lost == 1
    (record,) = caplog.records
    assert str(run_dir) in record.getMessage()
    assert f"the run continues in {fresh}" in record.getMessage()
    shutil.rmtree(fresh)
    assert folder.ensure().is_dir()
    assert folder.times_lost == 2


def test_what_belongs_to_another_run_stays_as_it_is(run_dir, folder):
    stranger(run_dir)
    fill(run_dir.with_name("run.rescued"))
    assert folder.ensure().name == "run.rescued1"
    assert (run_dir / "config.yaml").read_text() == "a: 1"
    assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]


def test_one_that_was_moved_and_linked_is_the_same(run_dir, folder):
    moved_and_linked(run_dir)
    assert folder.ensure() == run_dir
    assert folder.times_lost == 0


def test_where_nothing_can_be_made_the_error_says_so(run_dir, folder):
    shutil.rmtree(run_dir.parent)
    run_dir.parent.write_text("in the way")
    with pytest.raises(OSError, match="run"):
        folder.ensure()
    assert folder.times_lost == 0
