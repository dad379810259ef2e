"""End of a task after a stop signal, with submitit's handler and a requeue by Slurm."""

import os
import signal
import subprocess

import pytest
from submitit.core.utils import UncompletedJobError

from foundry.core.stop_signals import STOP_SIGNALS
from foundry.launch.slurm.task import NotRequeued, SlurmTask


@pytest.fixture(autouse=True)
def _handlers_come_back():
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def stop_task(error):
    """Run a task that receives SIGUSR2, on which submitit's handler raises `error`; return the task's SystemExit."""

    def checkpoint_and_try_requeue(signum, frame):
        raise error

    signal.signal(signal.SIGUSR2, checkpoint_and_try_requeue)
    with pytest.raises(SystemExit) as ended:
        SlurmTask(lambda run_dir: os.kill(os.getpid(), signal.SIGUSR2))("run")
    return ended.value


def slurm_says(monkeypatch, tmp_path, text):
    """Put a `scontrol` on PATH that prints `text` or, without `text`, fails; set the job id of this process."""
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{f'echo {text}' if text else 'exit 1'}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


@pytest.mark.parametrize("restarts", [1, 0, None])
def test_failed_requeue_command_is_checked_against_the_restart_count(monkeypatch, tmp_path, restarts):
    slurm_says(monkeypatch, tmp_path, None if restarts is None else f"JobId=7 JobState=COMPLETING Restarts={restarts}")
    ended = stop_task(subprocess.CalledProcessError(1, ["scontrol", "requeue", "7"]))
    assert ended.code == 128 + signal.SIGUSR2
    assert isinstance(ended, NotRequeued) is (restarts == 0)
    if restarts == 0:
        assert ended.reason.startswith("Slurm does not queue the job again (Command '['scontrol', 'requeue', '7']'")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_rank_without_a_requeue_continues_and_handles_signals():
    def checkpoint_and_try_requeue(signum, frame):
        asked.append(signum)

    asked = []
    signal.signal(signal.SIGUSR2, checkpoint_and_try_requeue)
    SlurmTask(lambda run_dir: [os.kill(os.getpid(), signal.SIGUSR2) for _ in range(2)] and 0)("run")
    assert asked == [signal.SIGUSR2] * 2
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN


@pytest.mark.parametrize(("executor", "limit"), [("slurm", "hydra.launcher.max_num_timeout"), ("local", "submitit")])
def test_task_beyond_the_allowed_time_limits_names_the_limit(monkeypatch, executor, limit):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
    monkeypatch.setenv("SUBMITIT_LOCAL_GLOBALID", "0")
    ended = stop_task(UncompletedJobError("timed-out too many times"))
    assert (ended.code, ended.reason) == (
        140,
        f"its time limit was reached as often as {limit} allows; the same command resumes it",
    )
