"""A run directory that is deleted, moved or replaced while the run trains."""

import ctypes
import json
import shutil

import pytest
from support.outcome import losses
from support.small_text import RUN, SMALL, write_text

from foundry.run_dir.checkpoints import find

STEPS = 1200  # enough that the run still trains if the test process has to wait for a CPU
WORDS = [*RUN, *SMALL, f"hparams.max_steps={STEPS}", "hydra.run.dir=run", "evaluation.write_samples=true"]
TWO = ["distributed=fsdp", "distributed.nproc_per_node=2"]
OTHERS = ["config.yaml", "metrics.jsonl", "result.json", "status.json"]
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # Linux constants


def deleted(run_dir):
    run_dir.rename(run_dir.with_name("going"))  # the run sees the whole folder vanish at once
    shutil.rmtree(run_dir.with_name("going"))


def moved(run_dir):
    run_dir.rename(run_dir.with_name("moved"))


def replaced(run_dir):
    """Replace the run directory in one system call; between two calls the run would notice its absence."""
    other = run_dir.with_name("moved")
    other.mkdir()
    for name in OTHERS:
        (other / name).write_text("somebody else's")
    assert ctypes.CDLL(None).renameat2(AT_FDCWD, bytes(other), AT_FDCWD, bytes(run_dir), RENAME_EXCHANGE) == 0


def emptied(run_dir):
    moved(run_dir)
    run_dir.mkdir()


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CASES = {
    "deleted": pytest.param((deleted, [], None), marks=pytest.mark.long),
    "moved": pytest.param((moved, ["checkpoint.asynchronous=false"], None), marks=pytest.mark.long),
    "emptied": pytest.param((emptied, [], []), marks=pytest.mark.long),
    "replaced": (replaced, ["tracking.mlflow=true"], OTHERS),
    "replaced under ranks": pytest.param((replaced, TWO, OTHERS), marks=[pytest.mark.distributed, pytest.mark.long]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_run_without_its_directory_ends_with_one_line_and_writes_nothing(shell, case):
    lose, more, left = case
    run_dir = shell.cwd / "run"
    overrides = [*WORDS, *more, write_text(shell.cwd)]
    process = shell.start(*overrides)
    shell.wait_for_steps(process, run_dir, 40)
    lose(run_dir)
    _, stderr = shell.finish(process, code=1)
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith(f"{run_dir} was deleted, moved or replaced")]
    assert "move the directory back and run the same command again" in line
    assert run_dir.exists() is (left is not None)
    assert content(run_dir) == dict.fromkeys(left or [], b"somebody else's")
    assert sorted(path.name for path in shell.cwd.glob("run*")) == ["run"][: run_dir.exists()]


@pytest.mark.long
def test_run_directory_that_is_moved_back_is_resumed(shell):
    run_dir = shell.cwd / "run"
    overrides = [*WORDS, "checkpoint.interval=20 steps", write_text(shell.cwd)]
    process = shell.start(*overrides)
    shell.wait_for_steps(process, run_dir, 60)
    moved(run_dir)
    shell.finish(process, code=1)
    run_dir.with_name("moved").rename(run_dir)
    saved = int(find(run_dir).name.removeprefix("step_"))
    assert saved >= 20
    assert "was deleted, moved or replaced" in (run_dir / "foundry.log").read_text()
    shell.run(*overrides)
    assert list(losses(run_dir))[-1] == STEPS
    assert find(run_dir).name == f"step_{STEPS:08d}"


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["local", "sequential"])
def test_sweep_continues_if_the_run_directory_of_a_job_is_deleted(shell, launcher):
    first, second = shell.cwd / "sweep" / "0", shell.cwd / "sweep" / "1"
    jobs = ["-m", "hparams.seed=1,2", f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep"]
    process = shell.start(*RUN, *SMALL, "hparams.max_steps=200", *jobs, write_text(shell.cwd))
    shell.wait_for_steps(process, first, 40)
    deleted(first)
    _, stderr = shell.finish(process, code=1)
    assert "Traceback" not in stderr
    assert "job 0 (hparams.seed=1): its run directory no longer exists" in stderr
    assert not first.exists()
    assert json.loads((second / "status.json").read_text())["state"] == "finished"
