"""Manifests of a job: functions from settings to dictionaries, as `kubectl apply` takes them in YAML.

References: Job and Service of Kubernetes (batch/v1, v1), TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1),
and the label that assigns a job to a queue of Kueue.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundry.config.schemas.kubernetes import Kind, Kubernetes, RuntimeKind, secret_reference
from foundry.core.exit_codes import Retry, codes
from foundry.run_dir.attempt import ATTEMPT as ATTEMPT_VARIABLE

Manifest = dict[str, Any]

TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
SWEEP, INDEX, RESOURCE = "foundry/sweep", "foundry/job", "foundry/resource"
"""Labels of all resources and pods: digest of the sweep directory, number of the job, and name of its resource."""
RUN_DIR, CONFIG_HASH, ATTEMPT = "foundry/run-dir", "foundry/config-hash", "foundry/attempt"
"""Annotations that identify a resource as this job's: run directory, configuration, and number of the submission."""
QUEUE = "kueue.x-k8s.io/queue-name"
CONTAINER = "node"
"""Name of the container and of the replicated job; Kubeflow's runtimes for torch use the same name."""

_MANAGER = "foundry/launcher"
_MASTER_PORT = 29500  # as Kubeflow's plugin for torch sets it
_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
# The pods of a TrainJob are named NAME-node-0-<index>-<5 letters>, at most 63 characters: up to 44 are left for NAME.
_LONGEST_PREFIX = 24


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a job; the name, labels and annotations of its resource depend on it.

    Attributes:
        sweep_dir: absolute path of the sweep directory.
        run_dir: absolute path of the run directory.
        index: number of the job.
        config_hash: hash of the job's configuration.
    """

    sweep_dir: Path
    run_dir: Path
    index: int
    config_hash: str


def resource_name(settings: Kubernetes, identity: Identity, attempt: int = 1) -> str:
    """Return the name of a job's resource: a DNS label of at most 44 characters, the same whenever it is derived.

    The digest is of the run directory and of the volumes that contain it, so two users with the same path on different
    volumes have different names.

    Args:
        settings: settings of the launcher.
        identity: the job.
        attempt: number of the submission, from 1; a job that has ended is submitted again under another name.
    """
    prefix = re.sub("[^a-z0-9]+", "-", settings.name.lower()).strip("-")
    prefix = (prefix if prefix[:1].isalpha() else f"run-{prefix}")[:_LONGEST_PREFIX].strip("-")
    digest = _digest(str(identity.run_dir), settings)
    return f"{prefix}-{identity.index}-{digest[:8]}" + (f"-{attempt}" if attempt > 1 else "")


def sweep_label(settings: Kubernetes, sweep_dir: Path) -> str:
    """Return the value of the label `SWEEP`."""
    return _digest(str(sweep_dir), settings)[:16]


def write_order(settings: Kubernetes, identity: Identity, attempt: int = 1) -> list[Manifest]:
    """Return the manifests of a job in the order of their creation; the last one is the job itself."""
    name = resource_name(settings, identity, attempt)
    metadata = _metadata(settings, identity, name, attempt)
    if settings.kind is Kind.trainjob:
        return [_trainjob(settings, identity, metadata)]
    job = _indexed_job(settings, identity, metadata)
    return [_service(metadata), job] if settings.nodes > 1 else [job]


def own_annotations(identity: Identity) -> dict[str, str]:
    """Return the annotations that identify the resource of a job."""
    return {RUN_DIR: str(identity.run_dir), CONFIG_HASH: identity.config_hash}


def failure_policy() -> Manifest:
    """Return the rules of a Job for pods that fail, derived from foundry's table of exit codes.

    A pod that was evicted, or that a signal stopped after it had saved, is replaced and does not count as a failure. A
    run that failed, or that foundry refused, ends the job. All other exit codes count towards the backoff limit.
    """
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": _on_exit(codes(Retry.continues))},
            {"action": "FailJob", "onExitCodes": _on_exit(codes(Retry.never, Retry.useless))},
        ]
    }


def _on_exit(values: list[int]) -> Manifest:
    # Kubernetes does not allow 0 in this list.
    return {"containerName": CONTAINER, "operator": "In", "values": [value for value in values if value != 0]}


def _digest(path: str, settings: Kubernetes) -> str:
    return hashlib.sha256("\0".join([path, *sorted(settings.volumes)]).encode()).hexdigest()


def _metadata(settings: Kubernetes, identity: Identity, name: str, attempt: int) -> Manifest:
    labels = {SWEEP: sweep_label(settings, identity.sweep_dir), INDEX: str(identity.index), RESOURCE: name}
    queue = {QUEUE: settings.queue} if settings.queue else {}
    return {
        "name": name,
        **_present(namespace=settings.namespace),
        "labels": {**settings.labels, **labels, **queue},
        "annotations": {**own_annotations(identity), ATTEMPT: str(attempt)},
    }


def _pod_metadata(metadata: Manifest) -> Manifest:
    return {"labels": {name: value for name, value in metadata["labels"].items() if name != QUEUE}}


def _service(metadata: Manifest) -> Manifest:
    """Return the headless Service that gives the pods of an Indexed Job their host names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, **_pod_metadata(metadata)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before any of them is ready
            "selector": {"batch.kubernetes.io/job-name": metadata["name"]},
        },
    }


def _indexed_job(settings: Kubernetes, identity: Identity, metadata: Manifest) -> Manifest:
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": _command(settings, identity.run_dir),
        "env": [*_env(settings), *_rendezvous(settings, metadata["name"])],
        **_container_patch(settings),
        **_present(
            envFrom=[{"secretRef": {"name": name}} for name in settings.env_from], resources=_resources(settings)
        ),
    }
    pod = {"restartPolicy": "Never", **_pod_patch(settings), "containers": [container]}
    if settings.nodes > 1:
        pod["subdomain"] = metadata["name"]
    spec = {
        "completionMode": "Indexed",
        "completions": settings.nodes,
        "parallelism": settings.nodes,
        "podFailurePolicy": failure_policy(),
        "template": {"metadata": _pod_metadata(metadata), "spec": pod},
        **_present(
            activeDeadlineSeconds=_seconds(settings.timeout_min),
            backoffLimit=settings.backoff_limit,
            ttlSecondsAfterFinished=_seconds(settings.ttl_min),
        ),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _trainjob(settings: Kubernetes, identity: Identity, metadata: Manifest) -> Manifest:
    """Return the TrainJob; it has no fields for volumes and placement, which are patches of its runtime."""
    pod = {**_pod_patch(settings), "containers": [{"name": CONTAINER, **_container_patch(settings)}]}
    template = {"metadata": _pod_metadata(metadata), "spec": pod}
    nodes = {"name": CONTAINER, "template": {"spec": {"template": template}}}
    return {
        "apiVersion": f"{TRAINER_GROUP}/{TRAINER_VERSION}",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER_GROUP, "kind": settings.runtime_kind.value, "name": settings.runtime},
            "trainer": {
                "image": settings.image,
                "command": _command(settings, identity.run_dir),
                "numNodes": settings.nodes,
                "numProcPerNode": settings.tasks_per_node,
                **_present(env=_env(settings), resourcesPerNode=_resources(settings)),
            },
            "runtimePatches": [
                {
                    "manager": _MANAGER,
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [nodes]}}},
                }
            ],
            **_present(activeDeadlineSeconds=_seconds(settings.timeout_min)),
        },
    }


def runtime_path(settings: Kubernetes) -> tuple[str, bool]:
    """Return the plural name of the runtime's kind, and whether it is in a namespace."""
    is_namespaced = settings.runtime_kind is RuntimeKind.TrainingRuntime
    return ("trainingruntimes" if is_namespaced else "clustertrainingruntimes"), is_namespaced


def _command(settings: Kubernetes, run_dir: Path) -> list[str]:
    command = [_literal(settings.python), "-m", "foundry.sweeps.worker", _literal(str(run_dir)), "trust=true"]
    if settings.workdir is None:
        return command
    # A TrainJob has no field for the working directory.
    return ["sh", "-c", 'cd "$0" && exec "$@"', _literal(settings.workdir), *command]


def _literal(text: str) -> str:
    """Return a text of a command or variable so that Kubernetes inserts no variable for `$(NAME)`, and keeps `$$`."""
    return text.replace("$", "$$")


def _env(settings: Kubernetes) -> list[Manifest]:
    variables = {name: _literal(value) for name, value in settings.env.items()}
    if settings.cpus_per_task is not None:
        variables.setdefault("OMP_NUM_THREADS", str(settings.cpus_per_task))
    references = {variable: secret_reference(text) for variable, text in settings.secrets.items()}
    return [
        {"name": ATTEMPT_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": _JOB_UID}}},
        *({"name": name, "value": value} for name, value in variables.items()),
        *(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
            for variable, (name, key) in references.items()
        ),
    ]


def _rendezvous(settings: Kubernetes, name: str) -> list[Manifest]:
    """Return the variables that Kubeflow's plugin for torch sets in a TrainJob."""
    address = f"{name}-0.{name}" if settings.nodes > 1 else "localhost"
    return [
        {"name": "PET_NNODES", "value": str(settings.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(settings.tasks_per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}},
        {"name": "PET_MASTER_ADDR", "value": address},
        {"name": "PET_MASTER_PORT", "value": str(_MASTER_PORT)},
    ]


def _resources(settings: Kubernetes) -> Manifest:
    """Return requests and limits of a pod; cores have no limit, so that a pod may use idle cores."""
    limits = dict[str, str]()
    if settings.mem_gb is not None:
        limits["memory"] = f"{round(1024 * settings.mem_gb)}Mi"
    if settings.gpus_per_node:
        limits[settings.gpu_resource] = str(settings.gpus_per_node)
    requests = dict(limits)
    if settings.cpus_per_task is not None:
        requests["cpu"] = str(settings.cpus_per_task * settings.tasks_per_node)
    return _present(requests=requests, limits=limits)


def _container_patch(settings: Kubernetes) -> Manifest:
    mounts = [{"name": _volume_name(claim), "mountPath": path} for claim, path in settings.volumes.items()]
    return {"volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}]}


def _pod_patch(settings: Kubernetes) -> Manifest:
    """Return the fields of the pod's specification that a TrainJob may patch too."""
    volumes = [
        {"name": _volume_name(claim), "persistentVolumeClaim": {"claimName": claim}} for claim in settings.volumes
    ]
    # NCCL and the workers of data loaders share memory; a container has 64 MiB by default. It counts as memory.
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    return {
        "terminationGracePeriodSeconds": settings.signal_delay_s,
        "volumes": volumes,
        **_present(
            serviceAccountName=settings.service_account,
            imagePullSecrets=[{"name": name} for name in settings.image_pull_secrets],
            nodeSelector=settings.node_selector,
            tolerations=settings.tolerations,
        ),
    }


def _volume_name(claim: str) -> str:
    """Return the name of a claim's volume, which unlike the claim's name is a DNS label."""
    return f"claim-{hashlib.sha256(claim.encode()).hexdigest()[:8]}"


def _present(**fields: Any) -> Manifest:
    """Return the fields without None, empty lists and empty dictionaries."""
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {})}


def _seconds(minutes: int | None) -> int | None:
    return None if minutes is None else 60 * minutes
