"""Takeover of a run directory: the run continues in a copy, and the original keeps every file."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from support.sweep_dirs import hold_lock

from foundry.run_dir.lock import LOCK
from foundry.sweeps.search.takeover import continue_from

FILES = {
    "status.json": json.dumps({"state": "stopped", "reason": "SIGTERM", "step": 1, "config_hash": "c0ffee"}),
    "metrics.jsonl": '{"step": 1}\n',
    "checkpoints/step_1/weights.safetensors": "weights",
    "checkpoints/step_1/nested/shard": "shard",
    ".hydra/config.yaml": "a: 1\n",
}
BELONG_TO_THE_COMMAND = ("trial.json", "slurm.json", "mlflow_parent.json", LOCK)


@pytest.fixture
def former(tmp_path):
    """The run directory of a stopped run, in a folder whose name is also the name of the folder of checkpoints."""
    folder = tmp_path / "checkpoints" / "sweep" / "3"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in BELONG_TO_THE_COMMAND[:-1]:
        (folder / name).write_text("{}")
    return folder


def read(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_run_continues_in_a_copy_and_the_original_keeps_its_files(former, tmp_path):
    before = read(former)
    run_dir = tmp_path / "mine" / "0"
    run_dir.parent.mkdir()
    assert continue_from(former, run_dir, "c0ffee")
    assert read(run_dir) == FILES
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    (run_dir / "status.json").write_text("{}")
    shutil.rmtree(run_dir / "checkpoints")
    assert read(former) == {**before, LOCK: (former / LOCK).read_text()}


def test_checkpoints_of_the_copy_need_no_more_space(former, tmp_path):
    run_dir = tmp_path / "copy"
    assert continue_from(former, run_dir, "c0ffee")
    is_shared = {name: (run_dir / name).samefile(former / name) for name in FILES}
    assert is_shared == {name: name.startswith("checkpoints/") for name in FILES}


def test_copy_continues_after_a_killed_copy(former, tmp_path):
    run_dir = tmp_path / "copy"
    (tmp_path / ".copy.copy" / "checkpoints").mkdir(parents=True)
    (tmp_path / ".copy.copy" / "checkpoints" / "part").write_text("part")
    assert continue_from(former, run_dir, "c0ffee")
    assert read(run_dir) == FILES
    assert not (tmp_path / ".copy.copy").exists()


@pytest.mark.parametrize("host", ["", "another-host"])
def test_directory_that_may_be_locked_is_not_copied(host, former, tmp_path):
    with hold_lock(former, host):
        assert not continue_from(former, tmp_path / "copy", "c0ffee")
    assert continue_from(former, tmp_path / "copy", "c0ffee") == (host == "")


def test_directory_of_another_run_or_none_is_not_copied(former, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "status.json").write_text('{"config_hash": "c0ffee"}')
    for path in (tmp_path / "missing", tmp_path / "files", former / "status.json"):
        assert not continue_from(path, tmp_path / "copy", "c0ffee")
    assert not continue_from(former, tmp_path / "copy", "other")
    (tmp_path / "copy").mkdir()
    assert not continue_from(former, tmp_path / "copy", "c0ffee")
    assert read(tmp_path / "copy") == {}


@pytest.mark.parametrize("name", ["lock", "shutil.copytree"])
def test_directory_that_cannot_be_locked_or_copied_is_left_and_the_run_starts_anew(
    name, former, tmp_path, monkeypatch, capsys
):
    """As if it belonged to another user."""

    def refuse(source, target, **options):
        Path(tmp_path, ".copy.copy").mkdir(exist_ok=True)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(f"foundry.sweeps.search.takeover.{name}", refuse)
    assert not continue_from(former, tmp_path / "copy", "c0ffee")
    assert not list(tmp_path.glob("*copy*"))
    message = f"{former} cannot be continued from (Permission denied); its run starts anew\n"
    assert capsys.readouterr().err == message


def test_symlinks_are_not_copied(former, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (former / "link.txt").symlink_to(tmp_path / "secret")
    (former / "checkpoints" / "latest").symlink_to(tmp_path)
    assert continue_from(former, tmp_path / "copy", "c0ffee")
    assert read(tmp_path / "copy") == FILES
