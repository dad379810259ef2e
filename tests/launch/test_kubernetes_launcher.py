"""Jobs on a stub of a cluster: checks before the start, names, attaching, `write`."""

import copy
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support.local_sweeps import TINY

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.core.errors import ConfigError
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import Phase, Unreachable
from foundry.launch.kubernetes import launcher as module
from foundry.launch.kubernetes.launcher import KubernetesLauncher
from foundry.run_dir.names import HYDRA
from foundry.run_dir.status import read_status
from foundry.sweeps import worker
from foundry.sweeps.reading import read_sweep
from foundry.sweeps.report import summary

pytest.importorskip("kubernetes", reason="needs the extra kubernetes; pip install -e '.[test]'")
pytest.importorskip("kubernetes_validate", reason="checks manifests; pip install -e '.[test]'")

from support.kube_manifests import check_manifest
from support.kube_server import KubeServer

from foundry.launch.kubernetes import cluster as cluster_module

SWEEP = [*TINY, "hydra/launcher=kubernetes", "hydra.launcher.image=foundry:1"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    (folder := tmp_path / "cluster").mkdir()
    monkeypatch.setattr(module, "_RETRY_SECONDS", (0.0, 0.0))
    with KubeServer(folder) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


@pytest.fixture(scope="module")
def composed():
    install()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return compose(CONFIG_NAME, [*SWEEP, "hydra.job.name=night run"], return_hydra_config=True)


@pytest.fixture
def started(tmp_path, composed):
    """Return a launcher and two jobs with settings of the launcher, in a sweep directory on the volume `shared`."""

    def start(*, sweep="s", subdir="", **settings):
        jobs = []
        for index in range(2):
            config = copy.deepcopy(composed)
            values = {"volumes": {"shared": str(tmp_path)}, **settings}
            changes = {f"hydra.launcher.{name}": value for name, value in values.items()}
            changes |= {"hydra.sweep.dir": str(tmp_path / sweep), "hydra.sweep.subdir": f"{subdir}{index}"}
            for key, value in {**changes, "hydra.job.num": index, "hparams.seed": index}.items():
                OmegaConf.update(config, key, value, force_add=True)
            run_dir = tmp_path / sweep / f"{subdir}{index}"
            jobs.append(ComposedJob(index=index, overrides=(), label="", run_dir=run_dir, config=config))
        launcher = KubernetesLauncher(lambda run_dir: 0)
        launcher.setup(hydra_context=None, task_function=None, config=jobs[0].config)
        launcher.check([job.config for job in jobs])
        return launcher, jobs

    return start


@pytest.fixture
def submitted(started):
    """Start the jobs with settings of the launcher, and leave them running; return the launcher and jobs."""

    def submit(**settings):
        launcher, jobs = started(detach=True, **settings)
        launcher.start(jobs)
        return launcher, jobs

    return submit


def names_of(cluster, plural="jobs"):
    return [job["metadata"]["name"] for job in cluster.jobs(plural)]


def test_write_writes_valid_manifests_without_a_cluster(tmp_path, run_command, cluster, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    words = ["hydra.launcher.write=manifests", "hydra.launcher.kind=job", "hydra.launcher.nodes=2"]
    words += [f"+hydra.launcher.volumes.shared={tmp_path}", "hparams.per_gpu_batch_size=2", "hparams.seed=0,1"]
    out, _ = run_command("-m", *SWEEP, *words)
    assert "2 jobs written to manifests; to submit them: kubectl apply --filename=manifests" in out
    for job, file in enumerate(sorted((tmp_path / "manifests").glob("*.yaml"))):
        service, manifest = yaml.safe_load_all(file.read_text())
        check_manifest(service)
        check_manifest(manifest)
        command = manifest["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[-2:] == [str(tmp_path / "s" / str(job)), "trust=true"]
        assert read_status(Path(command[-2]))["state"] == "queued"
    assert cluster.requests == []


@pytest.mark.parametrize("output_subdir", ["other", None])
def test_worker_finds_the_configuration_in_any_output_subdir(tmp_path, started, output_subdir):
    launcher, jobs = started(write=str(tmp_path / "w"))
    for job in jobs:
        OmegaConf.update(job.config, "hydra.output_subdir", output_subdir)
    launcher.start(jobs)
    assert (jobs[0].run_dir / HYDRA / "hydra.yaml").is_file()
    assert worker._set_up_job(jobs[1].run_dir, rank=1)["version"] == 1


@pytest.mark.parametrize("sweep", ["s", "lär: #1 'a'"])
def test_write_replaces_its_own_files_only(tmp_path, started, sweep):
    launcher, jobs = started(write=str(tmp_path / "w"), sweep=sweep)
    launcher.start(jobs)
    files = sorted((tmp_path / "w").iterdir())
    texts = [file.read_text() for file in files]
    launcher.start(jobs)
    assert [file.read_text() for file in sorted((tmp_path / "w").iterdir())] == texts
    files[0].write_text("kind: ConfigMap\n")
    with pytest.raises(ConfigError, match=f"write: is {tmp_path}/w, which contains {files[0].name} of somebody else"):
        launcher.start(jobs)
    assert files[0].read_text() == "kind: ConfigMap\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": "other"}, "hydra.launcher.context: is other, which the kubeconfig does not have; contexts: stub"),
        ({"namespace": "gone"}, "hydra.launcher.namespace: is gone, which does not exist in the cluster; create it"),
        ({"runtime": "gone"}, "hydra.launcher.runtime: is gone, which is not a ClusterTrainingRuntime; available: to"),
        ({"queue": "gpus"}, "hydra.launcher.queue: is gpus, which is not a local queue of Kueue in namespace team; t"),
        ({"service_account": "a"}, "hydra.launcher.service_account: is a, which is not a service account in namespace"),
        ({"volumes": {"gone": "/"}}, "hydra.launcher.volumes: has gone, which is not a claim in namespace team; avail"),
        ({"volumes": {}}, "which is on no volume of the jobs; mount the claim that contains it, at the same path as h"),
    ],
)
def test_missing_resource_is_reported_before_anything_is_started(started, cluster, settings, message):
    with pytest.raises(ConfigError) as caught:
        started(**settings)
    assert message in str(caught.value)
    assert cluster.created == []


@pytest.mark.parametrize("folder", ["/dev/null/x", "/proc/x"])
def test_folder_that_cannot_be_written_is_reported_in_one_line(started, folder):
    with pytest.raises(ConfigError) as caught:  # noqa: PT012
        launcher, jobs = started(write=folder)
        launcher.start(jobs)
    assert re.fullmatch(f"hydra.launcher.write: is {folder}.*; choose another", str(caught.value))


@pytest.mark.parametrize(
    ("sweep", "subdir", "key"), [("../s", "", "dir"), ("s", "../../", "subdir"), ("s", "/elsewhere/", "subdir")]
)
def test_directory_outside_of_all_volumes_is_refused(started, cluster, sweep, subdir, key):
    with pytest.raises(ConfigError, match=f"hydra.sweep.{key}: is /.*, which is on no volume of the jobs; mount the"):
        started(sweep=sweep, subdir=subdir)
    assert cluster.requests == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (("POST", "jobs", 403), "the cluster refuses a request (HTTP 403): the stub refuses; ask its administrator"),
        (("GET", "jobs", 403), "the cluster refuses a request (HTTP 403): the stub refuses; ask its administrator"),
        (("GET", "pods", 401), "the cluster refuses a request (HTTP 401): the stub refuses; log in to the cluster ag"),
        (("POST", "jobs", 422), "the cluster refuses a request (HTTP 422): the stub refuses"),
        (("POST", "jobs", 500), "the cluster does not respond: the stub refuses"),
    ],
)
def test_refusal_of_the_cluster_is_reported_before_anything_is_started(started, cluster, fault, message):
    cluster.faults.append(fault)
    with pytest.raises(ConfigError) as caught:
        started()
    assert f"hydra/launcher: is kubernetes but {message}" in str(caught.value)
    assert cluster.created == []


def test_resource_that_this_user_may_not_read_is_not_checked(started, cluster):
    cluster.faults += [("GET", "namespaces/team", 403), ("GET", "persistentvolumeclaims", 403)]
    started(volumes={"unknown": "/"})
    assert cluster.faults == []


def test_missing_package_and_kubeconfig_are_reported(started, cluster, monkeypatch):
    cluster.kubeconfig.unlink()
    with pytest.raises(ConfigError, match=r"hydra.launcher.context: has no kubeconfig to be in: "):
        started()
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "foundry.launch.kubernetes.cluster", raising=False)
    with pytest.raises(ConfigError, match=r"needs kubernetes, which is not installed; .*hydra.launcher.write=DIR"):
        started()


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_second_command_attaches_to_the_jobs_of_the_first(tmp_path, submitted, cluster, kind, capsys):
    submitted(kind=kind)
    names = names_of(cluster, f"{kind}s")
    assert names[0].startswith("night-run-0-")
    assert f"kubectl delete --namespace=team {kind}/{names[0]} {kind}/{names[1]}" in capsys.readouterr().out
    report = read_sweep(tmp_path / "s")
    assert [job.kubernetes_job["job_id"] for job in report.jobs] == [f"{kind}/{name}" for name in names]
    assert report.is_going
    lines = [line.plain for line in summary(report)]
    assert f"in Kubernetes: kubectl get --namespace=team {kind}/{names[0]} {kind}/{names[1]}" in lines
    submitted(kind=kind)
    assert f"job 0 is already in the queue as {kind}/{names[0]}" in capsys.readouterr().out
    assert len(cluster.created) == 2


def test_resource_whose_creation_got_no_answer_is_created_once(submitted, cluster):
    cluster.faults += [("POST", "services", "dropped"), ("POST", "/jobs", "dropped")]
    submitted(kind="job", nodes=2)
    assert cluster.faults == []
    created = [path.rpartition("/")[2] for path in cluster.created]
    assert sorted(created) == ["jobs", "jobs", "services", "services"]
    for service in cluster.jobs("services"):
        (owner,) = service["metadata"]["ownerReferences"]
        assert owner["uid"] == cluster.get("batch", "jobs", owner["name"])["metadata"]["uid"]


def test_service_gets_its_owner_if_the_first_request_fails(submitted, cluster):
    cluster.faults.append(("PATCH", "services", 500))
    submitted(kind="job", nodes=2)
    assert cluster.faults == []
    assert all(service["metadata"]["ownerReferences"] for service in cluster.jobs("services"))
    assert len(cluster.created) == 4


def test_refused_cancellation_is_repeated_by_the_queue(submitted, cluster):
    launcher, jobs = submitted(kind="job")
    ids = launcher.attach(jobs)
    cluster.faults.append(("DELETE", "jobs", 401))
    with pytest.raises(Unreachable, match=r"the cluster refuses a request \(HTTP 401\): .*; log in to the cluster"):
        launcher.cancel(ids.values())
    launcher.cancel(ids.values())
    assert cluster.jobs() == []


def test_name_of_somebody_else_is_an_error(tmp_path, started, submitted, cluster):
    launcher, jobs = started(kind="job", write=str(tmp_path / "w"))
    launcher.start(jobs)
    cluster.add("batch", "jobs", name := next((tmp_path / "w").glob("*-0-*.yaml")).stem)
    with pytest.raises(ConfigError, match=f"hydra.launcher.name: gives a job the name of {name}, which somebody else"):
        submitted(kind="job")
    assert cluster.created == []


def test_error_at_a_later_job_names_the_jobs_that_were_submitted(tmp_path, started, cluster, capsys):
    launcher, jobs = started(kind="job", nodes=2, write=str(tmp_path / "w"))
    launcher.start(jobs)
    cluster.add("", "services", name := next((tmp_path / "w").glob("*-1-*.yaml")).stem)
    launcher, jobs = started(kind="job", nodes=2)
    with pytest.raises(ConfigError, match=f"gives a job the name of {name}"):
        launcher.submit(jobs)
    assert [path.rpartition("/")[2] for path in cluster.created] == ["services", "jobs"]
    (first,) = names_of(cluster)
    line = f"1 job submitted before the error will run; to cancel: kubectl delete --namespace=team job/{first}"
    assert line in capsys.readouterr().out


def test_printed_command_quotes_the_context(submitted, cluster, capsys):
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    content["contexts"][0]["name"] = content["current-context"] = name = "my cluster; reboot"
    cluster.kubeconfig.write_text(yaml.safe_dump(content))
    submitted(context=name)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to cancel them: ")]
    assert shlex.split(line)[3:7] == ["kubectl", "delete", f"--context={name}", "--namespace=team"]


@pytest.mark.parametrize("config_hash", [None, "of a sweep that was deleted"])
def test_ended_job_is_submitted_again_under_another_name(submitted, cluster, config_hash):
    submitted(kind="job")
    first = cluster.jobs()[0]
    first["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    if config_hash is not None:
        first["metadata"]["annotations"]["foundry/config-hash"] = config_hash
    submitted(kind="job")
    assert len(names_of(cluster)) == 3
    assert f"{first['metadata']['name']}-2" in names_of(cluster)


def test_other_configuration_of_a_running_job_is_refused(submitted, cluster):
    submitted(kind="job")
    cluster.jobs()[0]["metadata"]["annotations"]["foundry/config-hash"] = "other"
    with pytest.raises(ConfigError, match="runs another configuration; wait for it, or delete it"):
        submitted(kind="job")


def test_interrupted_requests_of_a_watch_do_not_end_it(submitted, cluster):
    launcher, jobs = submitted(kind="job")
    ids = launcher.attach(jobs)
    for status in (500, 401, "dropped"):
        cluster.faults.append(("GET", "jobs", status))
        with pytest.raises(Unreachable):
            launcher.poll(ids.values())
    assert {state.phase for state in launcher.poll(ids.values()).values()} == {Phase.WAITING}


def test_page_of_a_proxy_in_place_of_an_answer_does_not_end_a_watch(submitted, cluster, monkeypatch):
    launcher, jobs = submitted(kind="job")
    ids = launcher.attach(jobs)
    page = SimpleNamespace(data=b"<html>log in</html>")
    monkeypatch.setattr(launcher._connected._core, "list_namespaced_pod", lambda *_, **__: page)
    with pytest.raises(Unreachable, match="the answer is not JSON"):
        launcher.poll(ids.values())


def test_client_in_a_pod_leaves_repetitions_to_the_queue_of_jobs(monkeypatch):
    monkeypatch.setattr(cluster_module.config, "load_incluster_config", lambda client_configuration: None)
    assert cluster_module._in_pod().configuration.retries == 0


def test_cancel_deletes_jobs_in_the_foreground_and_kill_their_pods(submitted, cluster):
    launcher, jobs = submitted(kind="job")
    ids = launcher.attach(jobs)
    launcher.cancel(ids.values())
    assert cluster.jobs() == []
    launcher.cancel(ids.values(), kill=True)  # a job that has been deleted is no error
    assert launcher.poll(ids.values()) == {}
    assert [path for method, path, _ in cluster.requests if method == "DELETE"][-1].endswith("/pods")


@pytest.mark.parametrize("value", ["'${oc.env:KEY}'", "0123456789abcdef"])
def test_secret_value_is_refused_and_the_name_of_a_secret_is_not(tmp_path, run_command, value):
    words = [f"hydra.sweep.dir={tmp_path}/s", "+hydra.launcher.secrets.WANDB_API_KEY=wandb/api-key"]
    words += ["hydra.launcher.image_pull_secrets=[registry]", f"+hydra.launcher.env.HF_TOKEN={value}"]
    words += ["+hydra.launcher.secrets={DB_PASSWORD: db/password}"]
    _, error = run_command("-m", *SWEEP, *words, code=2, variables={"KEY": "0123456789abcdef"})
    assert error == (
        "hydra.launcher.env.HF_TOKEN: is a secret, which the manifest would contain; store it in a Secret of the "
        "cluster, and set hydra.launcher.secrets to {HF_TOKEN: SECRET/KEY}\n"
    )
