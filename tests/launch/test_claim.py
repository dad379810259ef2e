"""A directory is claimed only if foundry may write to it, and a refused command leaves existing files unchanged."""

import errno
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.examples import examples

from foundry.core.errors import ConfigError
from foundry.launch.claim import check_free, claim, describe_disk_error, run_job
from foundry.run_dir.marker import MARK, is_foundry_folder
from foundry.run_dir.status import write_status

KEY = "hydra.run.dir"
OURS = [
    ".foundry",
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
    ".lock",
    "checkpoints/latest",
    "config.yaml",
    "foundry.log",
    "metrics.jsonl",
    "multirun.yaml",
    "plan.json",
    "plots/loss.png",
    "result.json",
    "schedule.csv",
    "status.json",
    "sweep.json",
    "tokenizer.json",
]
NAMES = [*OURS, "model.safetensors", "data/train.txt", "notes"]
CONTENTS = ["", "{}", "[]", "state: finished\n", '{"state": "finished"}', '{"state": ', "\x00", "foundry\n"]


def snapshot(folder):
    """Return mode, modification time and content of each path below a folder."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = None if path.is_dir() else path.read_bytes()
        entries[str(path.relative_to(folder))] = (status.st_mode, path.is_dir() or status.st_mtime_ns, content)
    return entries


def write_tree(folder, files):
    for name, (content, mode) in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(mode)
        os.utime(path, ns=(10**18, 10**18))


def write_as_hydra(folder):
    """Append to the files that a run writes before it checks its data."""
    (folder / ".hydra").mkdir(exist_ok=True)
    for name in (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "foundry.log", ".lock"):
        with (folder / name).open("a") as file:
            file.write("new")


trees = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.sampled_from(CONTENTS), st.sampled_from([0o644, 0o600, 0o755])), min_size=1
)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(files=trees)
def test_claim_refuses_a_folder_with_user_files_and_leaves_it_unchanged(files):
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "mine"
        folder.mkdir()
        write_tree(folder, files)
        before = snapshot(Path(parent))
        with pytest.raises(ConfigError) as refused:
            claim(str(folder), KEY, output_subdir=".hydra")
        (violation,) = refused.value.violations
        assert violation.key == KEY
        assert str(folder) in violation.message
        assert "\n" not in violation.message
        assert snapshot(Path(parent)) == before


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(files=trees, path=st.sampled_from(["run", "a/b/run"]))
def test_release_removes_new_files_and_keeps_files_next_to_the_folder(files, path):
    with TemporaryDirectory() as parent:
        write_tree(Path(parent), files)
        before = snapshot(Path(parent))
        new_claim = claim(str(Path(parent, path)), KEY, output_subdir=".hydra")
        write_as_hydra(new_claim.folder)
        new_claim.release()
        assert snapshot(Path(parent)) == before


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(files=trees)
def test_release_keeps_a_run_and_its_user_files(files):
    files = {name: value for name, value in files.items() if name not in (MARK, "status.json", "foundry.log")}
    with TemporaryDirectory() as parent:
        folder = Path(parent)
        write_tree(folder, {"foundry.log": ("log", 0o644), **files})
        write_status(folder, state="stopped", reason="SIGTERM")
        claim(str(folder), KEY)  # the earlier start of the run
        before = snapshot(folder)
        new_claim = claim(str(folder), KEY, output_subdir=".hydra")
        write_as_hydra(folder)
        new_claim.release()
        after = snapshot(folder)
        assert set(after) == set(before)
        for name in set(before) - {"foundry.log", MARK, ".lock"}:
            assert after[name][2] == before[name][2], name


def test_release_keeps_an_empty_folder_and_empty_parents(tmp_path):
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    for path in ("runs/empty", "runs/new"):
        new_claim = claim(str(tmp_path / path), KEY, output_subdir=".hydra")
        write_as_hydra(new_claim.folder)
        new_claim.release()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["runs", "runs/empty"]


def test_release_keeps_files_that_other_programs_wrote_meanwhile(tmp_path):
    new_claim = claim(str(tmp_path / "run"), KEY, output_subdir=".hydra")
    write_as_hydra(new_claim.folder)
    (tmp_path / "run" / "theirs.txt").write_text("kept")
    new_claim.release()
    assert snapshot(tmp_path).keys() == {"run", "run/theirs.txt"}


def test_check_free_accepts_an_existing_run_and_sweep(tmp_path):
    claim(str(tmp_path / "killed at once"), KEY)
    write_tree(tmp_path, {"killed at once/.hydra/config.yaml": ("", 0o644)})
    (tmp_path / "run").mkdir()
    write_status(tmp_path / "run", state="running")
    sweep = {"command": [], "created": "", "launcher": "local", "metric": "val_loss", "direction": "min", "jobs": []}
    write_tree(tmp_path, {"sweep/sweep.json": (json.dumps(sweep), 0o644)})
    for name in ("killed at once", "run", "sweep"):
        assert is_foundry_folder(tmp_path / name)
        assert check_free(str(tmp_path / name), KEY) == tmp_path / name


@pytest.mark.parametrize("name", [".hydra/hydra.yaml", "foundry.log", "config.yaml", ".lock"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_claim_refuses_a_symlink_or_pipe_among_the_files(tmp_path, name, kind):
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "run").mkdir()
    write_status(tmp_path / "run", state="stopped")
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target) if kind == "link" else os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir: is .*remove it"):
        claim(str(tmp_path / "run"), KEY, output_subdir=".hydra")
    assert target.read_text() == "kept"


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENAMETOOLONG]
)
@pytest.mark.parametrize("had_run", [False, True])
def test_run_job_reports_a_disk_error_in_one_line_and_releases_the_folder(tmp_path, monkeypatch, number, had_run):
    run_dir = tmp_path / "run"
    if had_run:
        run_dir.mkdir()
        write_status(run_dir, state="finished")
    before = snapshot(tmp_path)

    def write_and_fail(**given):
        (run_dir / ".hydra").mkdir()
        raise OSError(number, os.strerror(number), str(run_dir / ".hydra" / "config.yaml"))

    monkeypatch.setattr("foundry.launch.claim.hydra_run_job", write_and_fail)
    config = OmegaConf.create(
        {"hydra": {"run": {"dir": str(run_dir)}, "output_subdir": ".hydra", "job": {"name": "x"}}}
    )
    with pytest.raises(ConfigError) as refused:
        run_job(config=config, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=None)
    assert str(refused.value).startswith(f"hydra.run.dir: is {run_dir}, which cannot be used: {os.strerror(number)}")
    assert snapshot(tmp_path).keys() - {"run/.foundry"} == before.keys()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "r/plan.json"),
            "r/plan.json cannot be written: No space left",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "r/\n.lock"),
            "r/ .lock cannot be written: Read-only file system",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the run cannot be written: Disk quota exceeded"),
    ],
)
def test_describe_disk_error_is_one_printable_line(error, line):
    described = describe_disk_error(error)
    assert described.startswith(line)
    assert "hydra.run.dir" in described
    assert described.isprintable()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("x"), OSError("x")])
def test_describe_disk_error_ignores_other_errors(error):
    assert describe_disk_error(error) is None


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("", "is empty"),
        ("/", "files that are not foundry's"),
        (".", "files that are not foundry's"),
        ("..", "files that are not foundry's"),
        ("file", "is not a folder"),
        ("file/below/it", "is not a folder"),
        ("dangling", "is not a folder"),
        ("/proc/none", "cannot be used"),
        ("x" * 300, "File name too long"),
        ("nul\0byte", "null byte"),
    ],
)
def test_claim_refuses_an_unusable_path_with_one_line(tmp_path, monkeypatch, path, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = {path: path.lstat() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError) as refused:
        claim(path, KEY, output_subdir=".hydra")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
    assert {path: path.lstat() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("character", ["\n", "\r", "\t", "\x1b", "\x7f", "\u2028"])
def test_check_free_refuses_a_path_with_a_control_character(tmp_path, character):
    with pytest.raises(ConfigError, match="control character; choose a path"):
        check_free(str(tmp_path / f"a{character}b"), "hydra.run.dir")
    assert not list(tmp_path.iterdir())
