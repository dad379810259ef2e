"""A run directory that is deleted or moved while the run trains."""

import ctypes
import shutil

import pytest
from support.outcome import losses, status
from support.small_text import RUN, SMALL, write_text

from foundry.checkpoint.folder import problems
from foundry.run_dir.checkpoints import find, list_checkpoints

STEPS = 1200  # so that a test that waits for its turn still finds the run training
WORDS = [*RUN, *SMALL, f"hparams.max_steps={STEPS}", "hydra.run.dir=run", "evaluation.write_samples=true"]
TWO = ["distributed=fsdp", "distributed.nproc_per_node=2"]
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


def deleted(run_dir):
    run_dir.rename(run_dir.with_name("going"))  # as at once
    shutil.rmtree(run_dir.with_name("going"))


def moved(run_dir):
    run_dir.rename(run_dir.with_name("moved"))


def replaced(run_dir):
    """Put another folder in its place, in one call: between two the run would notice that there is none."""
    other = run_dir.with_name("moved")
    other.mkdir()
    (other / "config.yaml").write_text("somebody else's")
    assert ctypes.CDLL(None).renameat2(AT_FDCWD, bytes(other), AT_FDCWD, bytes(run_dir), RENAME_EXCHANGE) == 0


CASES = {
    "deleted": (deleted, [], "run"),
    "moved": pytest.param((moved, ["checkpoint.asynchronous=false"], "run"), marks=pytest.mark.long),
    "replaced": pytest.param((replaced, [], "run.rescued"), marks=pytest.mark.long),
    "deleted under two ranks": pytest.param((deleted, TWO, "run"), marks=[pytest.mark.distributed, pytest.mark.long]),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_run_ends_with_its_weights_in_a_new_folder(shell, case):
    lose, more, name = case
    run_dir, fresh = shell.cwd / "run", shell.cwd / name
    overrides = [*WORDS, *more, write_text(shell.cwd)]
    process = shell.start(*overrides)
    shell.wait_for_steps(process, run_dir, 40)
    lose(run_dir)
    stderr = shell.finish(process)[1]
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if "was deleted or moved while the run trains" in line]
    assert f"continues in {fresh}," in line
    assert status(fresh)["state"] == "finished"
    assert find(fresh).name == f"step_{STEPS:08d}"
    assert all(problems(folder) == [] for folder in list_checkpoints(fresh))
    assert list(losses(fresh))[-1] == STEPS
    assert (fresh / "result.json").is_file()
    assert "run trains" in (fresh / "foundry.log").read_text()
    shell.run(f"run={fresh}", "out=exported", module="foundry.export")
    if name == "run":
        assert "holds a finished run" in shell.run(*overrides)[1]
    else:
        assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]
        assert (run_dir / "config.yaml").read_text() == "somebody else's"


@pytest.mark.long
def test_where_nothing_can_be_written_a_line_says_why(shell):
    run_dir = shell.cwd / "deep" / "run"
    overrides = [*RUN, *SMALL, f"hparams.max_steps={STEPS}", f"hydra.run.dir={run_dir}", write_text(shell.cwd)]
    process = shell.start(*overrides)
    shell.wait_for_steps(process, run_dir, 40)
    run_dir.parent.rename(shell.cwd / "elsewhere")
    run_dir.parent.write_text("in the way")
    stderr = shell.finish(process, code=1)[1]
    assert f"SaveError: no checkpoint of step {STEPS}" in stderr
    assert "NotADirectoryError" in stderr or "FileExistsError" in stderr
