"""Manifests of Kubernetes jobs are valid, and contain the settings."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kube_manifests import InvalidManifest, check_manifest
from support.kube_pods import expanded

from foundry.config.schemas.kubernetes import Kind, Kubernetes
from foundry.core.exit_codes import Retry, retry
from foundry.launch.kubernetes.manifests import Identity, failure_policy, resource_name, write_order

pytest.importorskip("kubernetes_validate", reason="checks manifests; pip install -e '.[test]'")

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
IDENTITY = Identity(sweep_dir=Path("/data/s"), run_dir=Path("/data/s/0"), index=0, config_hash="c0ffee")
EVERYTHING = {
    "queue": "gpus",
    "namespace": "team",
    "nodes": 2,
    "tasks_per_node": 8,
    "gpus_per_node": 8,
    "cpus_per_task": 12,
    "mem_gb": 1.5,
    "timeout_min": 60,
    "volumes": {"shared.claim": "/data", "other": "/other"},
    "workdir": "/code dir",
    "env": {"HF_HOME": "/data/hf"},
    "secrets": {"WANDB_API_KEY": "wandb/key"},
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "node_selector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "labels": {"team": "a"},
}


def launcher(**values):
    return Kubernetes(**{"image": "registry.example/foundry:1", "name": "foundry", **values})


def created(**values):
    manifests = write_order(launcher(**values), IDENTITY)
    for manifest in manifests:
        check_manifest(manifest)
    return manifests


def container(job):
    return job["spec"]["template"]["spec"]["containers"][0]


def node_patch(job):
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_trainjob_is_valid(values):
    (job,) = created(kind=Kind.trainjob, **values)
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert job["spec"]["trainer"]["command"][-5:] == [
        "python",
        "-m",
        "foundry.sweeps.worker",
        "/data/s/0",
        "trust=true",
    ]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_indexed_job_is_valid(values):
    *services, job = created(
        kind=Kind.job, **values, **({"backoff_limit": 2, "ttl_min": 5, "env_from": ["all"]} if values else {})
    )
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", values.get("nodes", 1))
    assert len(services) == (1 if values else 0)


def test_both_kinds_request_the_same_resources_and_placement():
    (trainjob,) = created(kind=Kind.trainjob, **EVERYTHING)
    service, job = created(kind=Kind.job, backoff_limit=2, ttl_min=5, env_from=["all"], **EVERYTHING)
    spec, trainer, pod = job["spec"], trainjob["spec"]["trainer"], job["spec"]["template"]["spec"]
    assert (
        trainer["resourcesPerNode"]
        == container(job)["resources"]
        == {
            "requests": {"memory": "1536Mi", "nvidia.com/gpu": "8", "cpu": "96"},
            "limits": {"memory": "1536Mi", "nvidia.com/gpu": "8"},
        }
    )
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["command"] == container(job)["command"]
    assert trainer["command"][:4] == ["sh", "-c", 'cd "$0" && exec "$@"', "/code dir"]
    variables = {item["name"]: item.get("value") or item["valueFrom"] for item in container(job)["env"]}
    assert [item for item in container(job)["env"] if not item["name"].startswith("PET_")] == trainer["env"]
    assert variables["FOUNDRY_ATTEMPT"]["fieldRef"]["fieldPath"].endswith("/controller-uid']")
    assert variables["WANDB_API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "key"}}
    assert (variables["HF_HOME"], variables["OMP_NUM_THREADS"]) == ("/data/hf", "12")
    assert variables["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    patch = node_patch(trainjob)
    for name in ("serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations", "volumes"):
        assert patch[name] == pod[name]
    assert patch["containers"][0]["volumeMounts"] == container(job)["volumeMounts"]
    assert {m["mountPath"] for m in container(job)["volumeMounts"]} == {"/data", "/other", "/dev/shm"}
    assert patch["terminationGracePeriodSeconds"] == pod["terminationGracePeriodSeconds"] == 120
    for manifest in (trainjob, job):
        assert manifest["spec"]["activeDeadlineSeconds"] == 3600
        assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert manifest["metadata"]["labels"]["team"] == "a"
        assert manifest["metadata"]["annotations"]["foundry/run-dir"] == "/data/s/0"
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (2, 300)
    assert container(job)["envFrom"] == [{"secretRef": {"name": "all"}}]


HOSTILE = st.text("aü'\"`$(){}: #%&*-\n", min_size=1, max_size=20) | st.sampled_from(["$(HOME)", "$$(A)", "$$", "no"])


@pytest.mark.parametrize("kind", list(Kind))
@given(folder=HOSTILE, workdir=HOSTILE, value=HOSTILE)
@settings(max_examples=examples(100), deadline=None)
def test_texts_reach_the_process_unchanged(kind, folder, workdir, value):
    """Neither YAML, nor Kubernetes, which inserts variables, nor the shell that changes the folder interprets them."""
    identity = Identity(sweep_dir=Path("/s"), run_dir=Path("/s", folder), index=0, config_hash="")
    manifests = write_order(launcher(kind=kind, workdir=f"/{workdir}", env={"A": value, "B": value}), identity)
    (job,) = yaml.safe_load_all(yaml.safe_dump_all(manifests))
    content = job["spec"]["trainer"] if kind is Kind.trainjob else container(job)
    texts = {item["name"]: item["value"] for item in content["env"] if item["name"] in "AB"}
    assert [expanded(text, {"HOME": "/root", "A": "a"}) for text in texts.values()] == [value, value]
    command = [expanded(word, {"HOME": "/root", "A": "a"}) for word in content["command"]]
    words = ["python", "-m", "foundry.sweeps.worker", str(identity.run_dir), "trust=true"]
    assert command == ["sh", "-c", 'cd "$0" && exec "$@"', f"/{workdir}", *words]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": {"PET_NNODES": "2"}}, "hydra.launcher.env.PET_NNODES: is set, but the launcher sets it; remove it"),
        ({"secrets": {"FOUNDRY_ATTEMPT": "a/b"}}, "secrets.FOUNDRY_ATTEMPT: is set, but the launcher sets it; remove"),
        ({"env": {"GRÖSSE": "2"}}, "hydra.launcher.env: has 'GRÖSSE', which is not the name of a variable"),
        ({"labels": {"team": "grün1"}}, "hydra.launcher.labels: has team=grün1, which is not a label in Kubernetes"),
        ({"secrets": {"A": "wandb/schlüssel"}}, "hydra.launcher.secrets.A: is not of the form SECRET/KEY"),
    ],
)
def test_settings_that_kubernetes_would_refuse_are_reported(values, message):
    (violation,) = launcher(**values).check(1)
    assert message in str(violation)


def test_every_setting_of_the_schema_changes_the_manifests():
    """Except for the settings of the command, and the settings of one kind only."""
    others = {
        "kind": Kind.job,
        "image": "other",
        "name": "other",
        "runtime": "own",
        "signal_delay_s": 60,
        "python": "python3",
        "gpu_resource": "amd.com/gpu",
    }
    of_command = {
        "option",
        "_target_",
        "context",
        "write",
        "detach",
        "runtime_kind",
        "backoff_limit",
        "ttl_min",
        "env_from",
    }
    base = launcher(gpus_per_node=1)
    for item in fields(Kubernetes):
        if item.name in of_command:
            continue
        value = {**EVERYTHING, **others}[item.name]
        changed = Kubernetes(**{**vars(base), item.name: value})
        assert write_order(changed, IDENTITY) != write_order(base, IDENTITY), item.name


def test_misspelt_field_of_a_manifest_is_an_error():
    (trainjob,) = created(kind=Kind.trainjob)
    (job,) = created(kind=Kind.job)
    trainjob["spec"]["trainer"]["numNode"] = 1
    node_patch(trainjob)
    job["spec"]["template"]["spec"]["containers"][0]["imagePullpolicy"] = "Always"
    for manifest in (trainjob, job):
        with pytest.raises(InvalidManifest):
            check_manifest(manifest)


@given(
    name=st.text(max_size=60),
    folder=st.text("abc/ ü", max_size=200),
    index=st.integers(0, 10**6 - 1),
    attempt=st.integers(1, 99),
)
@settings(max_examples=examples(200), deadline=None)
def test_resource_names_are_dns_labels_that_differ_between_jobs(name, folder, index, attempt):
    identity = Identity(sweep_dir=Path("/s"), run_dir=Path("/s", folder), index=index, config_hash="")
    text = resource_name(launcher(name=name), identity, attempt)
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", text)
    # A pod of a TrainJob: NAME-node-0-<index of up to 5 digits>-<5 letters>, at most 63 characters.
    assert len(f"{text}-node-0-9999-abcde") <= 63
    assert text == resource_name(launcher(name=name), identity, attempt)
    assert text != resource_name(launcher(name=name), identity, attempt + 1)
    assert text != resource_name(launcher(name=name, volumes={"claim": "/s"}), identity, attempt)


def test_failure_policy_follows_the_table_of_exit_codes():
    disruption, ignored, failed = failure_policy()["rules"]
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (ignored["action"], failed["action"]) == ("Ignore", "FailJob")
    for code in range(1, 256):
        kind = retry(code)
        assert (code in ignored["onExitCodes"]["values"]) == (kind is Retry.continues)
        assert code not in failed["onExitCodes"]["values"] or kind in (Retry.never, Retry.useless)
    assert failed["onExitCodes"]["values"] == [1, 2]


def test_runtime_of_the_page_has_the_rules_of_an_indexed_job():
    blocks = re.findall(r"^```yaml\n(apiVersion.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (runtime,) = [block for block in map(yaml.safe_load, blocks) if block["kind"] == "TrainingRuntime"]
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    check_manifest(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job["template"]["spec"]}
    )
    assert job["template"]["spec"]["podFailurePolicy"] == failure_policy()


def test_page_lists_the_exit_codes_of_the_rules():
    _, ignored, failed = (rule.get("onExitCodes", {}).get("values") for rule in failure_policy()["rules"])
    rows = re.findall(r"^\| ([\d, ]+): .* \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(", ".join(map(str, ignored)), "Ignore"), (", ".join(map(str, failed)), "FailJob")]
