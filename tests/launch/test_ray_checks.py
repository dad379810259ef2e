"""Checks of `hydra/launcher=ray` that need no cluster: settings, and the resources of the nodes."""

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.schemas.launcher import PlacementStrategy, Ray, resolve_launcher
from foundry.core.errors import ConfigError
from foundry.launch.job_state import Unreachable
from foundry.launch.ray.cluster import bundle, check_nodes, connect
from foundry.launch.ray.job import RayJob
from foundry.launch.ray.launcher import RayLauncher
from foundry.run_dir.files import read_tail
from foundry.run_dir.names import RAY
from foundry.run_dir.status import read_status

CPU_NODE, GPU_NODE = {"CPU": 8.0, "memory": 64.0 * 2**30}, {"CPU": 16.0, "GPU": 4.0, "memory": 64.0 * 2**30}


def composed(*overrides):
    install()
    batch = ["hparams.per_gpu_batch_size=2", "hparams.global_batch_size=16"]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return compose(CONFIG_NAME, ["hydra/launcher=ray", *overrides, *batch], return_hydra_config=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distributed.nproc_per_node=2"], "nproc_per_node: is 2 but Ray starts the processes; set hydra.launcher.tas"),
        (["hydra.launcher.address=ray://head:1"], "address: is ray://head:1 but foundry connects as a node of the"),
        (["hydra.launcher.nodes=3"], "must be a multiple of per_gpu_batch_size 2 x 3 ranks = 6; nearest: 12 or 18"),
        (["hydra.launcher.gpus_per_task=2"], "gpus_per_task: is 2 but must be at most 1"),
        (
            ["hydra.launcher.gpus_per_task=0.5", "hydra.launcher.nodes=2"],
            "is 0.5 but each of the 2 processes of a job needs its",
        ),
        (["+hydra.launcher.resources.GPU=1"], "resources.GPU: is 1; set a positive amount of a custom resource"),
        (["+hydra.launcher.resources.a100=0"], "resources.a100: is 0; set a positive amount of a custom resource"),
        (["+hydra.launcher.runtime_env.env_vars.A=b"], "env_vars: would be written to Ray's logs; set hydra.launcher"),
        (["hydra.launcher.strategy=TIGHT"], "strategy: is TIGHT but must be one of STRICT_SPREAD, SPREAD, PACK, STRIC"),
    ],
)
def test_invalid_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        composed(*overrides)
    assert message in str(caught.value)


def test_environment_variables_of_jobs_can_refer_to_the_commands(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "value-of-some-key")
    config = composed("+hydra.launcher.env_vars.KEY=${oc.env:SOME_KEY}")
    assert resolve_launcher(config).env_vars == {"KEY": "value-of-some-key"}


def test_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^hydra/launcher: is ray, which needs ray, .* pip install '?ray") as caught:
        connect(Ray())
    assert "\n" not in str(caught.value)


def test_bundle_has_the_resources_of_all_tasks_of_a_node():
    settings = Ray(nodes=2, tasks_per_node=4, cpus_per_task=3, gpus_per_task=1, mem_gb=1.5, resources={"disk": 0.5})
    assert bundle(settings) == {"CPU": 12, "GPU": 4, "disk": 2, "memory": 1.5 * 2**30}
    assert bundle(Ray()) == {"CPU": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            Ray(cpus_per_task=9),
            "cpus_per_task: is 9 but no node has more than 8 cores; lower it, or set hydra",
        ),
        (
            Ray(cpus_per_task=3, tasks_per_node=3),
            "cpus_per_task: is 3 x tasks_per_node=3 but no node has more than 8 co",
        ),
        (Ray(gpus_per_task=1), "gpus_per_task: is 1 but no node has more than 0 GPUs; lower it"),
        (Ray(resources={"a100": 1}), "resources.a100: is 1 but no node has more than 0 units; lower it"),
        (Ray(mem_gb=65), "mem_gb: is 65 but no node has more than 64 GB of memory; lower it"),
        (Ray(nodes=3), "nodes: is 3 but the cluster has room for 2 at a time, with CPU 1 each; lower it"),
        (Ray(nodes=9, strategy=PlacementStrategy.STRICT_PACK), "nodes: is 9 but the cluster has room for 8 at a time"),
        (Ray(nodes=17, strategy=PlacementStrategy.PACK), "nodes: is 17 but the cluster has room for 16 at a time"),
    ],
)
def test_job_that_no_idle_cluster_can_run_is_refused_unless_the_cluster_grows(settings, message):
    with pytest.raises(ConfigError) as caught:
        check_nodes(settings, [CPU_NODE] * 2, uses_gpu=True)
    assert message in str(caught.value)
    check_nodes(replace(settings, autoscaling=True), [CPU_NODE] * 2, uses_gpu=True)


def test_gpus_must_be_requested_on_a_cluster_that_has_any():
    with pytest.raises(ConfigError, match=r"gpus_per_task: has no value, so Ray would hide the GPUs of the cluster"):
        check_nodes(Ray(), [CPU_NODE, GPU_NODE], uses_gpu=True)
    check_nodes(Ray(), [CPU_NODE, GPU_NODE], uses_gpu=False)
    check_nodes(Ray(gpus_per_task=0), [CPU_NODE, GPU_NODE], uses_gpu=True)
    check_nodes(Ray(gpus_per_task=1, tasks_per_node=4), [CPU_NODE, GPU_NODE], uses_gpu=True)
    with pytest.raises(ConfigError, match=r"nodes: is 2 but the cluster has room for 1 at a time, with CPU 1, GPU 1"):
        check_nodes(Ray(gpus_per_task=1, nodes=2), [CPU_NODE, GPU_NODE], uses_gpu=True)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(PlacementStrategy),
)
def test_check_accepts_exactly_the_jobs_that_can_be_placed(cores, nodes, tasks, cpus, strategy):
    settings = Ray(nodes=nodes, tasks_per_node=tasks, cpus_per_task=cpus, strategy=strategy)
    left, num_placed = list(cores), 0
    for machine in range(len(left)):
        if strategy is PlacementStrategy.STRICT_PACK:
            num_placed = 0
        while left[machine] >= tasks * cpus and num_placed < nodes:
            left[machine] -= tasks * cpus
            num_placed += 1
            if strategy is PlacementStrategy.STRICT_SPREAD:
                break
        if num_placed == nodes:
            break
    try:
        check_nodes(settings, [{"CPU": float(count)} for count in cores], uses_gpu=False)
    except ConfigError:
        assert num_placed < nodes
    else:
        assert num_placed == nodes


def test_jobs_of_a_search_are_accepted_after_the_death_of_a_node(monkeypatch):
    nodes = [{"Resources": CPU_NODE, "Alive": True}, {"Resources": CPU_NODE, "Alive": True}]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr("foundry.launch.ray.launcher.connect", lambda settings: None)
    config, launcher = composed("hydra.launcher.nodes=2"), RayLauncher(None)
    launcher.check([config, config])
    nodes[1]["Alive"] = False
    launcher.check([config])
    with pytest.raises(ConfigError, match="is 2 but the cluster has room for 1 at a time"):
        RayLauncher(None).check([config])


def test_ray_that_does_not_respond_to_a_signal_is_asked_again():
    ray = pytest.importorskip("ray", reason="needs the package ray")

    class Job:
        def stop(self, *, kill):
            raise ray.exceptions.RaySystemError("no route")

    launcher = RayLauncher(None)
    launcher._jobs["0"] = Job()
    with pytest.raises(Unreachable, match="no route"):
        launcher.cancel(["0"])


class Head:
    """Head node of a cluster that answers requests for placement groups, or not.

    Args:
        answers: for each request of a group, whether Ray creates it ("created"), creates it but its answer is lost
            ("unanswered"), or does not receive the request ("lost"); further requests are "created".
    """

    def __init__(self, answers):
        self.answers, self.groups = list(answers), {}

    def create(self, bundles, strategy, name):
        answer = self.answers.pop(0) if self.answers else "created"
        if answer == "lost":
            raise ray_exceptions().RpcError("no route")
        is_known = name in self.groups
        self.groups.setdefault(name, object())
        if answer == "unanswered":
            raise ray_exceptions().GetTimeoutError("no answer")
        if is_known:
            raise ray_exceptions().RaySystemError(f"because name '{name}' already exists.")
        return self.groups[name]

    def find(self, name):
        return self.groups[name]

    def remove(self, group):
        self.groups = {name: other for name, other in self.groups.items() if other is not group}

    def install(self, patch):
        actor = SimpleNamespace(locate=SimpleNamespace(remote=lambda *arguments: object()))
        options = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: actor))
        patch.setattr("ray.remote", lambda kind: options)
        patch.setattr("ray.kill", lambda actor: None)
        groups = import_module("ray.util.placement_group")  # ray.util has a function of the same name
        patch.setattr(groups, "placement_group", self.create)
        patch.setattr(groups, "get_placement_group", self.find)
        patch.setattr(groups, "remove_placement_group", self.remove)
        patch.setattr("ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy", lambda group, node: node)


def ray_exceptions():
    return pytest.importorskip("ray.exceptions", reason="needs the package ray")


@pytest.fixture(scope="module")
def config():
    ray_exceptions()
    return composed()


ANSWERS = st.lists(st.sampled_from(["created", "unanswered", "lost"]), max_size=8)


@settings(deadline=None)
@given(answers=ANSWERS)
def test_each_job_is_submitted_to_ray_once_over_outages(tmp_path_factory, config, answers):
    launcher, head = RayLauncher(composed), Head(answers)
    jobs = [SimpleNamespace(index=index, config=config, run_dir=tmp_path_factory.mktemp("run")) for index in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        head.install(patch)
        while True:
            try:
                ids = launcher.submit(jobs)
                break
            except Unreachable:
                assert len(head.groups) <= 3
        assert ids == {0: "0", 1: "1", 2: "2"}
        assert set(head.groups) == {read_tail(job.run_dir / RAY) for job in jobs}
        launcher.cancel(ids.values())
    assert head.groups == {}


@settings(deadline=None)
@given(answers=ANSWERS)
def test_a_restart_during_an_outage_is_one_restart(tmp_path_factory, config, answers):
    run_dir, head = tmp_path_factory.mktemp("run"), Head(())
    with pytest.MonkeyPatch.context() as patch:
        head.install(patch)
        job = RayJob("module", run_dir, resolve_launcher(config))
        job.submit()
        head.answers = list(answers)
        poll = partial(job._restart, "node n1 has died")
        while True:
            try:
                state = poll()
                break
            except (ray_exceptions().RpcError, ray_exceptions().GetTimeoutError):
                poll = job.poll
    assert state.detail == "restart 1 of 3 after: node n1 has died"
    assert read_status(run_dir)["restarts"] == ["node n1 has died"]
    assert list(head.groups) == [read_tail(run_dir / RAY)]
