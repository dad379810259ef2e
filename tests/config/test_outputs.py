"""Outputs of commands replace no file of a user, of a run or of another command."""

import json
import os

import pytest

from foundry.config.errors import ConfigError
from foundry.config.outputs import check_new_file, check_new_folder, check_new_stem, check_own_files
from foundry.run_dir import names


@pytest.fixture
def run(tmp_path):
    """A folder with the files by which a run is recognised."""
    folder = tmp_path / "run"
    (folder / names.CHECKPOINTS).mkdir(parents=True)
    for name in (names.CONFIG, names.STATUS):
        (folder / name).write_text("{}")
    return folder


def make(path, kind):
    """Put an entry of a kind at a path."""
    if kind == "file":
        path.write_text("my own")
    elif kind == "folder":
        path.mkdir()
        (path / "mine").touch()
    elif kind == "link":
        path.symlink_to("elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)


KINDS = ("file", "folder", "link", "pipe")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [check_new_file, check_new_folder])
def test_existing_entry_is_refused(tmp_path, check, kind):
    make(tmp_path / "out", kind)
    with pytest.raises(ConfigError, match=rf"^out: is {tmp_path}/out.*choose another$"):
        check("out", tmp_path / "out")


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
@pytest.mark.parametrize("suffix", [".txt", ".png", ".tar.gz"])
def test_file_with_the_same_stem_is_refused(tmp_path, kind, suffix):
    make(tmp_path / f"thesis{suffix}", kind)
    with pytest.raises(ConfigError, match=rf"^out: is {tmp_path}/thesis but .*/thesis{suffix} exists; choose another$"):
        check_new_stem("out", tmp_path / "thesis")
    check_new_stem("out", tmp_path / "the")


@pytest.mark.parametrize("check", [check_new_file, check_new_folder, check_new_stem])
@pytest.mark.parametrize("place", ["checkpoints/x", ".hydra/x", "transformers/x", "result.json", "metrics.jsonl"])
def test_names_that_belong_to_a_run_are_refused(run, check, place):
    with pytest.raises(ConfigError, match=rf"belongs to the run in {run}; choose another$"):
        check("out", run / place)


def test_a_link_into_a_run_is_followed(run, tmp_path):
    (tmp_path / "link").symlink_to(run / names.CHECKPOINTS)
    with pytest.raises(ConfigError, match="belongs to the run"):
        check_new_file("out", tmp_path / "link" / "x.json")


def test_new_names_are_accepted(run, tmp_path):
    for place in (run / "plots" / "mine", run / "eval_test.json", tmp_path / "new" / "checkpoints" / "x"):
        check_new_file("out", place)
        check_new_folder("out", place)
        check_new_stem("out", place)
    (tmp_path / "empty").mkdir()
    check_new_folder("out", tmp_path / "empty")


OTHERS = ["", "[]", "{}", '{"jobs": 1}', "not JSON", "[" * 100_000, "\0", "jobs,counts\n"]


@pytest.mark.parametrize("text", OTHERS)
def test_file_of_another_kind_is_not_replaced(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match=r"where report\.json is a file that this command has not written; move that"):
        check_own_files("dir", tmp_path, "report.json", ["jobs", "counts"], "report.csv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["report.json", "report.csv"])
def test_fixed_name_that_is_taken_is_refused(tmp_path, name, kind):
    make(tmp_path / name, kind)
    with pytest.raises(ConfigError, match=rf"where {name} is a file that this command has not written"):
        check_own_files("dir", tmp_path, "report.json", ["jobs"], "report.csv")


def test_own_files_are_replaced(tmp_path):
    check_own_files("dir", tmp_path / "new", "report.json", ["jobs"], "report.csv")
    (tmp_path / "report.json").write_text(json.dumps({"jobs": [], "more": 1}))
    (tmp_path / "report.csv").touch()
    check_own_files("dir", tmp_path, "report.json", ["jobs"], "report.csv")
