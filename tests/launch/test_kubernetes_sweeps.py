"""Sweeps on a stub of a cluster whose pods are processes with the command and environment of the manifest."""

import json
import signal

import pytest
from support.local_sweeps import Sweeps

from foundry.tracking.metrics_file import read_metrics

pytest.importorskip("kubernetes", reason="needs the extra kubernetes; pip install -e '.[test]'")
pytest.importorskip("kubernetes_validate", reason="checks manifests; pip install -e '.[test]'")

from support.kube_server import KubeServer

SECONDS = 240.0
"""Limit of a wait for processes that import torch, on a busy machine."""

pytestmark = [pytest.mark.long, pytest.mark.distributed]


@pytest.fixture
def cluster(tmp_path):
    (folder := tmp_path / "cluster").mkdir()
    with KubeServer(folder, runs_jobs=True) as cluster:
        yield cluster


@pytest.fixture
def sweeps(tmp_path, cluster):
    volume = f"+hydra.launcher.volumes.shared={tmp_path}"
    words = ["hydra.launcher.image=foundry:1", volume, "hparams.per_gpu_batch_size=2"]
    sweeps = Sweeps(tmp_path, "hydra/launcher=kubernetes", *words)
    sweeps.environment["KUBECONFIG"] = str(cluster.kubeconfig)
    yield sweeps
    sweeps.close()


def steps(sweeps, job):
    return [line["step"] for line in read_metrics(sweeps.cwd / "s" / str(job)) if "loss" in line]


def test_command_that_was_killed_continues_with_its_jobs(sweeps, cluster):
    cluster.add("kueue.x-k8s.io", "localqueues", "night")
    words = ["hydra.launcher.kind=job", "hydra.launcher.queue=night", "hparams.seed=0,1", "hparams.max_steps=3"]
    driver = sweeps.start(*words)
    sweeps.wait(lambda: "job 1 (hparams.seed=1): queued (suspended, as by a queue)" in sweeps.output, SECONDS)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver = sweeps.start(*words)
    sweeps.wait(lambda: sweeps.output.count("is already in the queue as job/foundry-") == 2, SECONDS)
    cluster.admitted.set()
    sweeps.finish(driver)
    assert [steps(sweeps, job) for job in (0, 1)] == [[1, 2, 3], [1, 2, 3]]
    assert len(cluster.created) == 2
    assert all(len(controller.pods) == 1 for controller in cluster.controllers.values())
    assert "2 jobs: 2 finished" in sweeps.output


def test_two_nodes_train_together_and_continue_after_an_eviction(sweeps, cluster):
    words = ["hydra.launcher.kind=job", "hydra.launcher.nodes=2", "distributed=fsdp", "hparams.max_steps=200"]
    driver = sweeps.start(*words)
    sweeps.wait_for_steps(0, 2, SECONDS)
    (controller,) = cluster.controllers.values()
    first, second = controller.pods
    assert controller.environment(1)["PET_NODE_RANK"] == "1"
    second.signal(signal.SIGTERM)
    sweeps.finish(driver)
    assert (first.exit_code, second.exit_code) == (143, 143)
    assert (len(controller.pods), controller.num_failures) == (4, 0)
    assert json.loads((sweeps.cwd / "s" / "0" / "plan.json").read_text())["world_size"] == 2
    assert steps(sweeps, 0) == list(range(1, 201))
    assert [path.rpartition("/")[2] for path in cluster.created] == ["services", "jobs"]


def test_trainjob_starts_its_tasks_when_the_queue_admits_it(sweeps, cluster):
    cluster.add("kueue.x-k8s.io", "localqueues", "night")
    words = ["hydra.launcher.queue=night", "hydra.launcher.tasks_per_node=2", "distributed=fsdp", "hparams.max_steps=3"]
    driver = sweeps.start(*words)
    sweeps.wait(lambda: "job 0: queued (suspended, as by a queue)" in sweeps.output, SECONDS)
    cluster.admitted.set()
    sweeps.finish(driver)
    assert json.loads((sweeps.cwd / "s" / "0" / "plan.json").read_text())["world_size"] == 2
    assert steps(sweeps, 0) == [1, 2, 3]
    assert cluster.jobs("trainjobs")[0]["status"]["conditions"][0]["type"] == "Complete"
