"""Jobs of a sweep side by side on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from foundry.config.launcher import Local
from foundry.launch.local_launcher import divide, visible_gpus
from foundry.tracking.metrics_file import read_metrics

TINY = [
    "hparams=diffusion",
    "debug=fast",
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=4",
    "evaluation.interval=null",
    "evaluation.write_samples=false",
    "tracking.plots=false",
    "hydra/launcher=local",
    "hydra.launcher.n_jobs=2",
    "hydra.sweep.dir=s",
]


class Sweeps:
    """Sweeps that somebody starts in an empty folder."""

    def __init__(self, cwd):
        self.cwd = cwd
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}

    def start(self, *words):
        with (self.cwd / "said.txt").open("w") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "foundry", "-m", *TINY, *words],
                cwd=self.cwd,
                env=self.environment,
                stdout=said,
                stderr=said,
            )

    @property
    def said(self):
        return (self.cwd / "said.txt").read_text()

    def finish(self, driver, code=0):
        driver.wait(100)
        assert driver.returncode == code, self.said

    def status(self, job):
        return json.loads((self.cwd / "s" / str(job) / "status.json").read_text())

    def wait_for_steps(self, job, steps, seconds=60):
        path, deadline = self.cwd / "s" / str(job) / "metrics.jsonl", time.monotonic() + seconds
        while not path.is_file() or path.read_bytes().count(b"\n") < steps:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def process_of(self, job):
        """The process that trains in the job's directory."""
        lock = str(self.cwd / "s" / str(job) / ".lock")
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                if str(link.readlink()) == lock:
                    return int(link.parts[2])
        raise AssertionError(f"no process trains in {lock}")


@pytest.fixture
def sweeps(tmp_path):
    return Sweeps(tmp_path)


def steps(run_dir):
    return [line["step"] for line in read_metrics(run_dir) if "loss" in line]


def cut(cores=8, gpus=0, nproc=1, num_jobs=100, **settings):
    shares = divide(Local(**settings), nproc, range(cores), [str(number) for number in range(gpus)], num_jobs)
    return [(share.cores, share.gpus) for share in shares]


def test_cores_are_divided_among_the_jobs():
    assert cut(cores=8, n_jobs=2) == [((0, 1, 2, 3), ()), ((4, 5, 6, 7), ())]
    assert len(cut(cores=8)) == 2
    assert len(cut(cores=8, cores_per_job=1)) == 8
    assert len(cut(cores=8, cores_per_job=1, nproc=3)) == 2
    assert cut(cores=2) == [((0, 1), ())]
    assert cut(cores=2, n_jobs=3) == [((), ())] * 3


def test_gpus_are_divided_among_the_jobs():
    assert [gpus for _, gpus in cut(gpus=4)] == [("0",), ("1",), ("2",), ("3",)]
    assert [gpus for _, gpus in cut(gpus=4, nproc=2)] == [("0", "1"), ("2", "3")]
    assert [gpus for _, gpus in cut(gpus=4, num_jobs=1)] == [("0", "1", "2", "3")]
    assert [gpus for _, gpus in cut(gpus=2, n_jobs=4)] == [("0",), ("1",), ("0",), ("1",)]


def test_only_visible_gpus_are_given_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932f937")
    assert visible_gpus() == ["3", "GPU-8932f937"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_one_that_fails_and_one_that_is_killed_do_not_end_the_others(sweeps):
    part = "foundry.models.dit.DiT"
    driver = sweeps.start("hparams.seed=1,2", f"model._target_={part},{part}Nowhere", "hparams.max_steps=60")
    sweeps.wait_for_steps(0, 5)
    os.kill(sweeps.process_of(0), signal.SIGKILL)
    sweeps.finish(driver, code=1)
    assert [sweeps.status(job)["state"] for job in range(4)] == ["failed", "failed", "finished", "failed"]
    assert sweeps.status(0)["reason"] == "killed by SIGKILL: out of memory?"
    assert "DiTNowhere" in sweeps.status(1)["reason"]
    log = (sweeps.cwd / "s" / "1" / "foundry.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "job 0 (hparams.seed=1 " in sweeps.said
    assert "3 failed, 1 finished" in sweeps.said


def test_after_ctrl_c_and_after_a_crash_of_the_sweep_it_goes_on(sweeps):
    words = ["hparams.max_steps=120", "hparams.seed=1,2"]
    driver = sweeps.start(*words)
    for job in (0, 1):
        sweeps.wait_for_steps(job, 5)
    driver.send_signal(signal.SIGINT)
    sweeps.finish(driver, code=130)
    assert [sweeps.status(job)["state"] for job in (0, 1)] == ["stopped"] * 2

    driver = sweeps.start(*words)
    for job in (0, 1):
        sweeps.wait_for_steps(job, sweeps.status(job)["step"] + 5)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 30
    while [sweeps.status(job)["state"] for job in (0, 1)] != ["stopped"] * 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    driver = sweeps.start(*words)
    sweeps.finish(driver)
    for job in (0, 1):
        assert sweeps.status(job)["state"] == "finished"
        assert steps(sweeps.cwd / "s" / str(job)) == list(range(1, 121))
