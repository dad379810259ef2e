"""The launcher `submitit_local`: jobs through submitit on this machine."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.utils import JobStatus
from support.local_sweeps import Sweeps

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.core.errors import ConfigError
from foundry.launch.composed_job import ComposedJob
from foundry.launch.submitit_local_launcher import SubmititLocalLauncher
from foundry.tracking.metrics_file import read_metrics


@pytest.fixture
def sweeps(tmp_path):
    sweeps = Sweeps(tmp_path, "hydra/launcher=submitit_local")
    yield sweeps
    sweeps.close()


RANKS = ["hydra.launcher.tasks_per_node=2", "distributed=fsdp", "hparams.per_gpu_batch_size=2"]


def composed(*overrides):
    """Compose a job; give values to the settings that resolve only in a process started by Hydra."""
    install()
    words = [*overrides, "hydra/launcher=submitit_local", "hydra.launcher.name=a", "hydra.launcher.submitit_folder=a"]
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        return compose(CONFIG_NAME, words, return_hydra_config=True)


def tasks(folder):
    """Return the process ids of submitit tasks whose job files are in a folder."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"submitit.core._submit" in command and any(str(folder).encode() in word for word in command):
                pids.append(int(process.name))
    return pids


def shards(run_dir):
    return {path.name: path.read_bytes() for path in (run_dir / "checkpoints" / "latest").glob("*.safetensors")}


def test_submitit_local_tasks_are_ranks(tmp_path, monkeypatch):
    def work(run_dir):
        from foundry.config.environment import detect
        from foundry.run_dir.result import write_result
        from foundry.run_dir.status import write_status

        environment = detect()
        (run_dir / f"rank {environment.rank}").write_text(
            f"{environment.launcher} {environment.local_rank} {environment.master_port}"
        )
        if environment.rank == 0:
            write_result(run_dir, {"metric": environment.world_size})
            write_status(run_dir, state="finished")
        return 0

    monkeypatch.chdir(tmp_path)
    config = composed("hydra.launcher.tasks_per_node=2", "hydra.job.num=0")
    job = ComposedJob(index=0, overrides=(), label="", run_dir=tmp_path / "0", config=config)
    launcher = SubmititLocalLauncher(work)
    launcher.setup(hydra_context=None, task_function=None, config=config)
    (result,) = launcher.start([job])
    assert (result.status, result.return_value) == (JobStatus.COMPLETED, 2)
    ranks = [(tmp_path / "0" / f"rank {rank}").read_text().split() for rank in (0, 1)]
    assert [rank[:2] for rank in ranks] == [["submitit", "0"], ["submitit", "1"]]
    assert ranks[0][2] == ranks[1][2], "they meet at one port"


@pytest.mark.long
def test_second_ctrl_c_kills_the_tasks_of_submitit_local(tmp_path, monkeypatch):
    def work(run_dir):
        import os
        import signal
        import time

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (run_dir / f"started {os.getpid()}").touch()
        time.sleep(300)

    monkeypatch.chdir(tmp_path)
    config = composed("hydra.launcher.tasks_per_node=2", "hydra.job.num=0")
    job = ComposedJob(index=0, overrides=(), label="", run_dir=tmp_path / "0", config=config)
    launcher = SubmititLocalLauncher(work)
    launcher.setup(hydra_context=None, task_function=None, config=config)
    wait = launcher.wait

    def press_ctrl_c(seconds):
        wait(seconds)
        if len(list(job.run_dir.glob("started *"))) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launcher, "wait", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        launcher.start([job])
    assert job.state == "stopped"
    deadline = time.monotonic() + 60
    while tasks(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_submitit_local_tasks_train_together_to_the_weights_of_the_local_launcher(sweeps):
    sweeps.finish(sweeps.start(*RANKS, "hparams.max_steps=3"))
    run_dir = sweeps.cwd / "s" / "0"
    assert sweeps.status(0)["state"] == "finished"
    assert json.loads((run_dir / "plan.json").read_text())["world_size"] == 2
    assert sorted(shards(run_dir)) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert [line["step"] for line in read_metrics(run_dir) if "loss" in line] == [1, 2, 3]
    assert "job 0: finished; 1 finished" in sweeps.output
    assert "1 job: 1 finished" in sweeps.output
    ours = Sweeps(sweeps.cwd, "hydra/launcher=local", "distributed.nproc_per_node=2", "hydra.sweep.dir=t")
    ours.finish(ours.start(*RANKS[1:], "hparams.max_steps=3"))
    assert shards(run_dir) == shards(sweeps.cwd / "t/0")


@pytest.mark.parametrize(
    ("visible", "settings", "message"),
    [
        ("0", [], "has no value, so submitit would hide this machine's GPUs; set one for each process"),
        ("0", ["gpus_per_node=2", "tasks_per_node=2"], "is 2 but the number of visible GPUs is 1"),
        ("GPU-8932f937", ["gpus_per_node=1"], "is 1 but submitit needs CUDA_VISIBLE_DEVICES as numbers, not GPU-8932f"),
        (
            "0,1",
            ["gpus_per_node=1"],
            "is 1 but submitit starts all jobs at once, on the same GPUs; add hydra.sweeper",
        ),
    ],
)
def test_submitit_local_refuses_jobs_without_separate_gpus(monkeypatch, visible, settings, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = composed(*(f"hydra.launcher.{word}" for word in settings))
    with pytest.raises(ConfigError) as caught:
        SubmititLocalLauncher(lambda run_dir: 0).check([config, config])
    assert str(caught.value).startswith(f"hydra.launcher.gpus_per_node: {message}")


def test_submitit_local_accepts_gpu_jobs_one_at_a_time(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    one = composed("hydra.launcher.gpus_per_node=1", "hydra.sweeper.max_batch_size=1")
    SubmititLocalLauncher(lambda run_dir: 0).check([one, one])
    cpu = composed("hydra.launcher.gpus_per_node=0")
    SubmititLocalLauncher(lambda run_dir: 0).check([cpu, cpu])


@pytest.mark.long
def test_submitit_local_job_continues_after_its_time_limit(sweeps):
    """Send the signal that submitit's controller process sends before the time limit."""
    driver = sweeps.start(*RANKS, "hparams.max_steps=200")
    sweeps.wait_for_steps(0, 5)
    for rank in tasks(sweeps.cwd):
        os.kill(rank, signal.SIGUSR2)
    sweeps.finish(driver)
    assert sweeps.status(0)["state"] == "finished"
    steps = [line["step"] for line in read_metrics(sweeps.cwd / "s/0") if "loss" in line]
    assert steps == list(range(1, 201)), "none is lost, and none done twice"
    assert "job 0: finished" in sweeps.output


@pytest.mark.long
def test_ctrl_c_stops_submitit_local_jobs_which_resume_later(sweeps):
    overrides = [*RANKS, "hparams.seed=1,2", "hparams.max_steps=200"]
    driver = sweeps.start(*overrides)
    for job in (0, 1):
        sweeps.wait_for_steps(job, 3)
    sweeps.ctrl_c(driver)
    sweeps.finish(driver, code=130)
    assert "SIGINT: 2 running (saving and stopping)" in sweeps.output
    assert "the same command with hydra.sweep.dir=s resumes from there" in sweeps.output
    assert [sweeps.status(job)["state"] for job in (0, 1)] == ["stopped", "stopped"]
    sweeps.finish(sweeps.start(*overrides))
    for job in (0, 1):
        steps = [line["step"] for line in read_metrics(sweeps.cwd / "s" / str(job)) if "loss" in line]
        assert steps == list(range(1, 201))


@pytest.mark.long
def test_killed_rank_of_a_submitit_local_job_does_not_end_other_jobs(sweeps):
    driver = sweeps.start(*RANKS, "hparams.seed=1,2", "hparams.max_steps=100")
    sweeps.wait_for_steps(0, 3)
    os.kill(sweeps.process_of(0), signal.SIGKILL)
    sweeps.finish(driver, code=1)
    assert [sweeps.status(job)["state"] for job in (0, 1)] == ["failed", "finished"]
    assert "job 0 (hparams.seed=1): rank 0 has ended, perhaps killed; " in sweeps.output


@pytest.mark.long
def test_submitit_local_job_of_one_task_may_start_its_ranks(sweeps):
    sweeps.finish(sweeps.start("distributed.nproc_per_node=2", "distributed=fsdp", "hparams.per_gpu_batch_size=2"))
    assert len(shards(sweeps.cwd / "s/0")) == 2
