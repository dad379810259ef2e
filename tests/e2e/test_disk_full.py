"""A run directory on a disk that fills up."""

import signal

import pytest
from support.outcome import losses, status
from support.small_disk import fill, small_disk
from support.small_text import RUN, SMALL, write_text
from support.warm import WarmShell

from foundry.checkpoint.folder import problems
from foundry.run_dir.checkpoints import find, list_checkpoints

WORDS = [*RUN, *SMALL, "hparams.max_steps=40", "hydra.run.dir=small/run"]


@pytest.fixture
def disk(tmp_path):
    """A file system of 400 kB; yields a function that resizes it."""
    with small_disk(tmp_path / "small", "400k") as resize:
        yield resize


@pytest.fixture
def shell(tmp_path, cache, disk):
    return WarmShell(tmp_path, cache)


@pytest.fixture
def overrides(tmp_path):
    return [*WORDS, write_text(tmp_path)]


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        ["checkpoint.asynchronous=true"],
        pytest.param(["checkpoint.asynchronous=false"], marks=pytest.mark.long),
        pytest.param(
            ["distributed=fsdp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=1"],
            marks=[pytest.mark.distributed, pytest.mark.long],
        ),
    ],
    ids=["asynchronous", "synchronous", "two ranks"],
)
def test_full_disk_does_not_end_training_but_fails_the_run(shell, overrides, disk, more):
    run_dir = shell.cwd / "small" / "run"
    stderr = shell.run(*overrides, *more, code=1)[1]
    (first,) = list_checkpoints(run_dir)
    assert first.name == "step_00000010"
    assert problems(first) == []
    failed = [line for line in stderr.splitlines() if "[ERROR]" in line and "No space left on device" in line]
    assert [line.partition("no checkpoint of ")[2].split(" at ")[0] for line in failed] == [
        "step 20",
        "step 30",
        "step 40",
    ]
    assert not list((run_dir / "checkpoints").glob(".step_*"))
    assert status(run_dir)["state"] == "failed"
    assert "no checkpoint of step 40" in status(run_dir)["reason"]
    assert "No space left on device" in status(run_dir)["reason"]
    assert not (run_dir / "result.json").exists()
    assert list(losses(run_dir)) == list(range(1, 41))
    disk("8m")
    assert "after step 10" in shell.run(*overrides, *more)[0]
    assert status(run_dir)["state"] == "finished"
    assert find(run_dir).name == "step_00000040"
    assert list(losses(run_dir)) == list(range(1, 41))


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_run_fails_if_the_best_checkpoint_of_the_last_step_cannot_be_saved(shell, overrides, asynchronous):
    run_dir = shell.cwd / "small" / "run"
    only_best = ["checkpoint.save_final=false", "checkpoint.interval=null", "checkpoint.every_minutes=null"]
    first = [*overrides, *only_best, f"checkpoint.asynchronous={asynchronous}", "evaluation.interval=20"]
    stderr = shell.run(*first, code=1)[1]
    assert "SaveError: no checkpoint of step 40" in stderr
    assert status(run_dir)["state"] == "failed"
    assert find(run_dir, "best").name == "step_00000020"


@pytest.mark.long
def test_run_fails_if_its_result_cannot_be_written(shell, overrides, disk):
    run_dir = shell.cwd / "small" / "run"
    disk("8m")
    many = [*overrides, "checkpoint.interval=null", "hparams.max_steps=200"]
    process = shell.start(*many)
    shell.wait_for_steps(process, run_dir, 5)
    (run_dir / "result.json").mkdir()
    assert "result.json is a folder" in shell.finish(process, code=2)[1]
    assert status(run_dir)["state"] == "failed"
    assert "result.json" in status(run_dir)["reason"]
    (run_dir / "result.json").rmdir()
    assert "after step 200" in shell.run(*many)[0]
    assert status(run_dir)["state"] == "finished"


@pytest.mark.long
def test_sigterm_on_a_full_disk_stops_the_run(shell, overrides):
    run_dir = shell.cwd / "small" / "run"
    process = shell.start(*overrides, "hparams.max_steps=4000")
    shell.wait_for_steps(process, run_dir, 30)
    process.send_signal(signal.SIGTERM)
    stderr = shell.finish(process, code=143)[1]
    assert "nothing was saved" in stderr
    assert "Traceback" not in stderr
    assert status(run_dir)["state"] == "stopped"
    assert status(run_dir)["reason"].startswith("SIGTERM; no checkpoint of step ")


@pytest.mark.long
def test_strict_saves_end_the_run_on_a_full_disk_and_it_resumes_later(shell, overrides, disk):
    run_dir = shell.cwd / "small" / "run"
    stderr = shell.run(*overrides, "checkpoint.strict_saves=true", code=1)[1]
    assert "SaveError: no checkpoint of step 20" in stderr
    assert "No space left on device" in stderr
    assert status(run_dir)["state"] == "failed"
    assert "SaveError" in status(run_dir)["reason"]
    disk("8m")
    assert "after step 10" in shell.run(*overrides, "checkpoint.strict_saves=true")[0]
    assert [folder.name[-2:] for folder in list_checkpoints(run_dir)] == ["40", "30", "20", "10"]
    assert list(losses(run_dir)) == list(range(1, 41))


@pytest.mark.long
def test_completely_full_disk_loses_log_records_and_the_last_checkpoint(shell, overrides, disk):
    run_dir, overrides = shell.cwd / "small" / "run", [*overrides, "hparams.max_steps=400"]
    process = shell.start(*overrides)
    shell.wait_for_steps(process, run_dir, 20)
    fill(run_dir.parent / "ballast")
    stderr = shell.finish(process, code=1)[1]
    assert len([line for line in stderr.splitlines() if "foundry.log: [Errno 28] No space left on device" in line]) == 1
    assert "SaveError: no checkpoint of step 400" in stderr
    (run_dir.parent / "ballast").unlink()
    disk("8m")
    assert all(problems(folder) == [] for folder in list_checkpoints(run_dir))
    assert "continues" in shell.run(*overrides)[0]
    assert status(run_dir)["state"] == "finished"
    assert losses(run_dir)[400] > 0
