import pytest
from support.composition import configure

from foundry.core.errors import ConfigError
from foundry.launch.local import WorkerFailed
from foundry.launch.restarts import Restarts
from foundry.run_dir.status import read_status, write_status

KILLED = "killed by SIGKILL: out of memory?"


def save(run_dir, step):
    (run_dir / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)


def test_max_restarts_limits_restarts_and_records_their_reasons(tmp_path, caplog):
    restarts = Restarts(tmp_path, 2)
    for step in (10, 20, 30):
        save(tmp_path, step)
        assert restarts.allow(WorkerFailed(1, KILLED)) == (step < 30)
    status = read_status(tmp_path)
    assert status["state"] == "requeued"
    assert status["reason"] == f"restart 2 of 2 after: rank 1 failed: {KILLED}"
    assert status["restarts"] == [f"rank 1 failed: {KILLED}"] * 2
    assert "restart 1 of 2, from the checkpoint of step 10" in caplog.text


def test_restart_needs_a_newer_checkpoint_than_the_last_failure(tmp_path):
    restarts = Restarts(tmp_path, 5)
    assert restarts.allow(WorkerFailed(1, KILLED))  # without a checkpoint, from scratch
    assert restarts.allow(WorkerFailed(0, KILLED))
    assert not restarts.allow(WorkerFailed(0, KILLED))
    save(tmp_path, 5)
    assert restarts.allow(WorkerFailed(0, KILLED))


@pytest.mark.parametrize("kind", ["NonFiniteError", "LossSpike", "OutOfMemoryError"])
def test_deterministic_failures_are_not_restarted(tmp_path, kind):
    assert not Restarts(tmp_path, 5).allow(WorkerFailed(0, "step 7 ...", kind=kind))


def test_stopped_and_finished_runs_are_not_restarted(tmp_path):
    failed = WorkerFailed(0, "SaveError: no space left")
    failed.was_stopped = True
    assert not Restarts(tmp_path, 5).allow(failed)
    write_status(tmp_path, state="finished")
    assert not Restarts(tmp_path, 5).allow(WorkerFailed(0, KILLED))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "is 3 but foundry starts no processes; set distributed.nproc_per_node"),
        (
            ["distributed.nproc_per_node=2", "checkpoint.interval=null", "checkpoint.every_minutes=null"],
            "is 3 but the run saves no checkpoints to restart from; set checkpoint.interval",
        ),
        (
            ["distributed.nproc_per_node=2", "checkpoint.resume=never"],
            "is 3 but checkpoint.resume=never prevents restarts",
        ),
    ],
)
def test_max_restarts_is_refused_without_processes_or_checkpoints(overrides, message):
    with pytest.raises(ConfigError, match=f"distributed.max_restarts: {message}"):
        configure("debug=fast", "hparams.per_gpu_batch_size=1", "distributed.max_restarts=3", *overrides)


def test_max_restarts_is_refused_under_torchrun(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun starts the processes; start it with --max-restarts=4"):
        configure("debug=fast", "hparams.per_gpu_batch_size=1", "distributed.max_restarts=4")
