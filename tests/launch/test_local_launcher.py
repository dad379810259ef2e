"""The local launcher: parallel jobs of a sweep on this machine."""

import os
import signal
import time
from collections import deque
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from support.local_sweeps import Sweeps

from foundry.config.environment import visible_gpus
from foundry.config.schemas.launcher import Local
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import Phase
from foundry.launch.local_launcher import LocalLauncher, Share, divide
from foundry.run_dir.lock import is_held
from foundry.tracking.metrics_file import read_metrics


@pytest.fixture
def sweeps(tmp_path):
    return Sweeps(tmp_path, "hydra/launcher=local", "hydra.launcher.n_jobs=2")


def steps(run_dir):
    return [line["step"] for line in read_metrics(run_dir) if "loss" in line]


def divided_shares(cores=8, gpus=0, nproc=1, num_jobs=100, **settings):
    shares = divide(Local(**settings), nproc, range(cores), [str(number) for number in range(gpus)], num_jobs)
    return [(share.cores, share.gpus) for share in shares]


def test_divide_splits_cores_among_jobs():
    assert divided_shares(cores=8, n_jobs=2) == [((0, 1, 2, 3), ()), ((4, 5, 6, 7), ())]
    assert len(divided_shares(cores=8)) == 2
    assert len(divided_shares(cores=8, cores_per_job=1)) == 8
    assert len(divided_shares(cores=8, cores_per_job=1, nproc=3)) == 2
    assert divided_shares(cores=2) == [((0, 1), ())]
    assert divided_shares(cores=2, n_jobs=3) == [((), ())] * 3


def test_divide_splits_gpus_among_jobs():
    assert [gpus for _, gpus in divided_shares(gpus=4)] == [("0",), ("1",), ("2",), ("3",)]
    assert [gpus for _, gpus in divided_shares(gpus=4, nproc=2)] == [("0", "1"), ("2", "3")]
    assert [gpus for _, gpus in divided_shares(gpus=4, num_jobs=1)] == [("0", "1", "2", "3")]
    assert [gpus for _, gpus in divided_shares(gpus=2, n_jobs=4)] == [("0",), ("1",), ("0",), ("1",)]


def test_visible_gpus_follow_cuda_visible_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932f937")
    assert visible_gpus() == ["3", "GPU-8932f937"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


class Process:
    """A process of a job; every process has the same id, as after the operating system has used all ids."""

    pid, sentinel = 7, None

    def __init__(self, target=None, args=(), name=""):
        self.exitcode = None

    def start(self):
        Process.last = self

    def close(self):
        pass


def test_job_whose_process_has_the_id_of_an_ended_one_is_running(tmp_path):
    launcher = LocalLauncher(None)
    launcher._server, launcher._free_shares = SimpleNamespace(Process=Process), deque([Share((), ())])
    config = OmegaConf.create({"distributed": {"nproc_per_node": 1}})
    phases = []
    for index in (0, 1):
        job = ComposedJob(index=index, overrides=(), label="", run_dir=tmp_path, config=config)
        ids = launcher.submit([job]).values()
        phases += [launcher.poll(ids)[job_id].phase for job_id in ids]
        Process.last.exitcode = 1
        phases += [launcher.poll(ids)[job_id].phase for job_id in ids]
    assert phases == [Phase.RUNNING, Phase.ENDED] * 2


@pytest.mark.long
def test_failed_and_killed_jobs_do_not_end_other_local_jobs(sweeps):
    part = "foundry.models.transformer.Transformer"
    driver = sweeps.start("hparams.seed=1,2", f"model._target_={part},functools.partial", "hparams.max_steps=100")
    sweeps.wait_for_steps(0, 5)
    os.kill(sweeps.process_of(0), signal.SIGKILL)
    sweeps.finish(driver, code=1)
    assert [sweeps.status(job)["state"] for job in range(4)] == ["failed", "failed", "finished", "failed"]
    assert sweeps.status(0)["reason"] == "killed by SIGKILL: out of memory?"
    assert "partial" in sweeps.status(1)["reason"]
    log = (sweeps.cwd / "s" / "1" / "foundry.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "job 0 (hparams.seed=1 " in sweeps.output
    assert "3 failed, 1 finished" in sweeps.output


@pytest.mark.long
def test_local_sweep_resumes_after_ctrl_c_and_after_a_crash(sweeps):
    overrides = ["hparams.max_steps=400", "hparams.seed=1,2"]
    driver = sweeps.start(*overrides)
    for job in (0, 1):
        sweeps.wait_for_steps(job, 5)
    sweeps.ctrl_c(driver)
    sweeps.finish(driver, code=130)
    assert [sweeps.status(job)["state"] for job in (0, 1)] == ["stopped"] * 2
    assert "SIGINT: 2 running (saving and stopping), 0 queued; a second Ctrl-C kills the running jobs" in sweeps.output
    assert sweeps.output.endswith("the same command with hydra.sweep.dir=s resumes from there\n")

    driver = sweeps.start(*overrides)
    for job in (0, 1):
        sweeps.wait_for_steps(job, sweeps.status(job)["step"] + 5)
    driver.kill()
    driver.wait()
    sweeps.wait(lambda: [sweeps.status(job)["state"] for job in (0, 1)] == ["stopped"] * 2)
    driver = sweeps.start(*overrides)
    sweeps.finish(driver)
    for job in (0, 1):
        assert sweeps.status(job)["state"] == "finished"
        assert steps(sweeps.cwd / "s" / str(job)) == list(range(1, 401))


def test_ctrl_c_before_jobs_run_ends_the_local_sweep_quietly(sweeps):
    driver = sweeps.start("hparams.seed=1,2")
    sweeps.wait(lambda: "at a time" in sweeps.output)
    time.sleep(0.3)
    sweeps.ctrl_c(driver)
    sweeps.finish(driver, code=130)
    expected = ["2 jobs, 2 at a time", "the same command with hydra.sweep.dir=s resumes from there"]
    assert sweeps.output.splitlines() == expected
    assert [sweeps.status(job)["state"] for job in (0, 1)] == ["queued"] * 2


@pytest.mark.long
def test_ctrl_c_stops_all_ranks_of_a_local_job_and_a_second_one_kills(sweeps):
    overrides = [
        "hparams.max_steps=5000",
        "hparams.seed=1,2",
        "distributed.nproc_per_node=2",
        "hydra.launcher.n_jobs=1",
    ]
    driver = sweeps.start(*overrides, "hparams.per_gpu_batch_size=2")
    sweeps.wait_for_steps(0, 5)
    sweeps.ctrl_c(driver)
    sweeps.finish(driver, code=130)
    assert [sweeps.status(job)["state"] for job in (0, 1)] == ["stopped", "queued"]
    saved = sweeps.status(0)["step"]
    assert saved >= 5

    driver = sweeps.start(*overrides, "hparams.per_gpu_batch_size=2")
    sweeps.wait_for_steps(0, saved + 5)
    os.kill(sweeps.process_of(0), signal.SIGSTOP)  # so that the job cannot save
    sweeps.ctrl_c(driver)
    sweeps.wait(lambda: "SIGINT: 1 running" in sweeps.output)
    sweeps.ctrl_c(driver)
    sweeps.finish(driver, code=130)
    sweeps.wait(lambda: not is_held(sweeps.cwd / "s" / "0"))
