"""Sweeps on a Ray cluster of two nodes on this machine; the death of a node, of Ray on it, or of the command."""

import os
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.local_sweeps import Sweeps

from foundry.tracking.metrics_file import read_metrics

pytestmark = pytest.mark.long
if find_spec("ray") is None:
    pytest.skip("needs the package ray", allow_module_level=True)

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
FAST_DETECTION = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 5000}
RUN = [
    "tracking.mlflow=false",
    "hparams.per_gpu_batch_size=2",
    "hparams.max_steps=160",
    "checkpoint.interval=20",
    "distributed=ddp",
]
SECONDS = 300  # longest wait on a busy machine
RAY = ["hydra/launcher=ray", "hydra.launcher.nodes=2"]


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read at import: Ray uses the loopback interface
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": FAST_DETECTION})
        cluster.add_node(**NODE)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def start_sweeps(tmp_path, cluster):
    started = []

    def start_sweeps(name, *launcher):
        (tmp_path / name).mkdir()
        started.append(Sweeps(tmp_path / name, *launcher, *RUN))
        return started[-1]

    yield start_sweeps
    for sweeps in started:
        sweeps.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of a job of the local launcher with two ranks."""
    folder = tmp_path_factory.mktemp("local")
    sweeps = Sweeps(folder, "hydra/launcher=local", "hydra.launcher.n_jobs=1", "distributed.nproc_per_node=2", *RUN)
    sweeps.finish(sweeps.start("hparams.seed=1"))
    return losses(folder, 0)


def losses(folder, job):
    return {line["step"]: line["loss"] for line in read_metrics(folder / "s" / str(job)) if "loss" in line}


def descendants(pid):
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, (thread / "children").read_text().split()):
            yield child
            yield from descendants(child)


def kill_worker_node(cluster, *, only_raylet):
    """Kill a node, and replace it.

    Args:
        cluster: the cluster.
        only_raylet: kill only Ray's own process of the node; the actor outlives it.
    """
    node = next(iter(cluster.worker_nodes))
    raylet = node.all_processes["raylet"][0].process.pid
    pids = [raylet] if only_raylet else [raylet, *descendants(raylet)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.worker_nodes.remove(node)
    cluster.add_node(**NODE)


def test_jobs_over_two_nodes_equal_local_jobs(start_sweeps, undisturbed):
    sweeps = start_sweeps("ray", *RAY)
    sweeps.finish(sweeps.start("hparams.seed=1,2"))
    assert losses(sweeps.cwd, 0) == undisturbed
    assert len(losses(sweeps.cwd, 1)) == len(undisturbed) == 160
    assert "job 1 (hparams.seed=2): queued (Resources)" in sweeps.output


def test_job_resumes_after_the_death_of_a_node_and_of_ray_on_a_node(cluster, start_sweeps, undisturbed):
    sweeps = start_sweeps("killed", *RAY)
    driver = sweeps.start("hparams.seed=1")
    sweeps.wait_for_steps(0, 45, SECONDS)
    kill_worker_node(cluster, only_raylet=False)
    sweeps.wait(lambda: sweeps.status(0)["state"] == "running" and sweeps.status(0).get("restarts"), SECONDS)
    sweeps.wait_for_steps(0, 70, SECONDS)
    kill_worker_node(cluster, only_raylet=True)
    sweeps.finish(driver)
    assert losses(sweeps.cwd, 0) == undisturbed
    restarts = sweeps.status(0)["restarts"]
    assert len(restarts) == 2
    for number, reason in enumerate(restarts, 1):
        assert "has died" in reason
        assert f"job 0: requeued (restart {number} of 3 after: {reason})" in sweeps.output


def test_job_saves_if_the_command_is_stopped_or_killed(start_sweeps):
    sweeps = start_sweeps("stopped", *RAY)
    driver = sweeps.start("hparams.seed=1")
    sweeps.wait_for_steps(0, 30, SECONDS)
    sweeps.ctrl_c(driver)
    sweeps.finish(driver, code=130)
    stop = sweeps.status(0)
    assert (stop["state"], stop["reason"]) == ("stopped", "SIGINT")
    assert (sweeps.cwd / "s" / "0" / "checkpoints" / f"step_{stop['step']:08d}").is_dir()
    driver = sweeps.start("hparams.seed=1")
    sweeps.wait_for_steps(0, stop["step"] + 20, SECONDS)
    driver.kill()
    sweeps.wait(lambda: sweeps.status(0)["state"] == "stopped", SECONDS)
    assert stop["step"] < sweeps.status(0)["step"] < 160
