"""Settings of `hydra/launcher=kubernetes`; their names follow the settings of Slurm."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from foundry.config.schemas.launcher_base import PLUGINS, Launcher
from foundry.config.setting import check_unused, setting
from foundry.core.errors import Violation, as_text
from foundry.run_dir.attempt import ATTEMPT

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_SECRET_KEY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-\w.]+", re.ASCII)
_TOLERATION = {"key", "operator", "value", "effect", "tolerationSeconds"}
_KEY = "hydra.launcher"


class Kind(Enum):
    """Kind of the resource that a job becomes.

    Attributes:
        trainjob: TrainJob of Kubeflow Trainer, version 2.
        job: Indexed Job of Kubernetes itself, with a headless Service if it has several nodes.
    """

    trainjob = "trainjob"
    job = "job"


class RuntimeKind(Enum):
    """Kind of the runtime that a TrainJob refers to.

    Attributes:
        ClusterTrainingRuntime: runtime for all namespaces.
        TrainingRuntime: runtime in the namespace of the jobs.
    """

    ClusterTrainingRuntime = "ClusterTrainingRuntime"
    TrainingRuntime = "TrainingRuntime"


@dataclass(frozen=True, kw_only=True)
class Kubernetes(Launcher):
    """Jobs of a Kubernetes cluster, as TrainJobs or Indexed Jobs; names follow the settings of Slurm."""

    option: ClassVar[str] = "kubernetes"
    limit_remedy: ClassVar[str] = "leave it out, and set hydra.launcher.queue to a queue of Kueue with a quota"
    _target_: str = f"{PLUGINS}.KubernetesLauncher"
    kind: Kind = setting(Kind.trainjob, "trainjob: TrainJob of Kubeflow Trainer; job: Indexed Job of Kubernetes")
    image: str | None = setting(None, "container image with foundry, required; preferably with a digest")
    name: str = setting("${hydra.job.name}", "first part of the names of the resources")
    namespace: str | None = setting(None, "namespace; null: that of the context")
    context: str | None = setting(
        None, "context of the kubeconfig; null: the current one, in a pod its service account"
    )
    queue: str | None = setting(None, "local queue of Kueue; null: jobs start without Kueue")
    runtime: str = setting("torch-distributed", "runtime of a TrainJob")
    runtime_kind: RuntimeKind = setting(RuntimeKind.ClusterTrainingRuntime, "kind of the runtime")
    nodes: int = setting(1, "nodes per job, each one pod", ge=1, le=10**5)
    tasks_per_node: int = setting(1, "processes per node; times nodes: the number of ranks", ge=1, le=1024)
    gpus_per_node: int | None = setting(None, "GPUs per node, one for each task", ge=0, le=1024)
    gpu_resource: str = setting("nvidia.com/gpu", "resource name of a GPU")
    cpus_per_task: int | None = setting(
        None, "cores per process, including the workers of the data loader", ge=1, le=10**5
    )
    mem_gb: float | None = setting(None, "memory per node in GiB; a pod that exceeds it is killed", gt=0, le=10**6)
    timeout_min: int | None = setting(
        None, "time limit in minutes, after which the job saves and stops; null: none", ge=1, le=5_256_000
    )
    signal_delay_s: int = setting(
        120, "seconds from SIGTERM, when the run saves a checkpoint, to SIGKILL", ge=1, le=65_535
    )
    backoff_limit: int | None = setting(
        None, "restarts of pods that fail, kind=job only; null: Kubernetes' default, 6", ge=0, le=10**6
    )
    ttl_min: int | None = setting(
        None, "minutes until an ended job is removed, kind=job only; null: it stays", ge=0, le=5_256_000
    )
    volumes: dict[str, str] = setting(
        dict, "mounted PersistentVolumeClaims: {claim: path}, the same path as on the machine of the command"
    )
    workdir: str | None = setting(None, "folder in the container where the job starts; null: the image's")
    python: str = setting("python", "Python interpreter in the image")
    env: dict[str, str] = setting(dict, "environment variables; a secret value is refused")
    secrets: dict[str, str] = setting(dict, "environment variables from secrets: {variable: secret/key}")
    env_from: list[str] = setting(list, "secrets whose keys all become environment variables, kind=job only")
    service_account: str | None = setting(None, "service account of the pods; null: the namespace's default")
    image_pull_secrets: list[str] = setting(list, "secrets of the image registry")
    node_selector: dict[str, str] = setting(dict, "labels that a node must have")
    tolerations: list[Any] = setting(list, "tolerations of the pods, as in Kubernetes")
    labels: dict[str, str] = setting(dict, "labels of the resources and pods")
    write: str | None = setting(None, "folder for the manifests, which are then not submitted; null: submit the jobs")
    detach: bool = setting(False, "submit the jobs and exit; they continue without this process")

    def check(self, nproc_per_node: int) -> Iterator[Violation]:
        """Check for settings that contradict each other, `distributed.nproc_per_node` or Kubernetes' syntax."""
        if not self.image:
            yield Violation(f"{_KEY}.image", "has no value; set it to a container image that contains foundry")
        if nproc_per_node != 1:
            message = "but the pods start the processes; set hydra.launcher.tasks_per_node instead"
            yield Violation("distributed.nproc_per_node", f"is {nproc_per_node} {message}")
        if self.gpus_per_node and self.gpus_per_node != self.tasks_per_node:
            message = f"but tasks_per_node is {self.tasks_per_node}, and each task trains on one GPU"
            yield Violation(f"{_KEY}.gpus_per_node", f"is {self.gpus_per_node} {message}; set both to the same value")
        if self.kind is Kind.trainjob:
            yield from self._check_trainjob()
        else:
            yield from check_unused(self, _KEY, ["runtime", "runtime_kind"], f"{_KEY}.kind=trainjob")
        yield from self._check_names()
        yield from self._check_variables()
        yield from self._check_placement()

    def _check_trainjob(self) -> Iterator[Violation]:
        """Reject settings that have no field in a TrainJob."""
        for name, remedy in (
            ("backoff_limit", "set it in the runtime"),
            ("ttl_min", "delete ended jobs with kubectl"),
            ("env_from", "use hydra.launcher.secrets"),
        ):
            if (value := getattr(self, name)) not in (None, []):
                message = f"but only an Indexed Job has this field; {remedy}, or set hydra.launcher.kind=job"
                yield Violation(f"{_KEY}.{name}", f"is {as_text(value)} {message}")

    def _check_names(self) -> Iterator[Violation]:
        names = [(name, getattr(self, name)) for name in ("namespace", "queue", "runtime", "service_account")]
        names += [
            (name, item) for name in ("volumes", "env_from", "image_pull_secrets") for item in getattr(self, name)
        ]
        for name, value in names:
            if value is not None and not (len(value) <= 253 and _NAME.fullmatch(value)):
                message = "is not a name in Kubernetes, which has lower-case letters, digits, - and ."
                yield Violation(f"{_KEY}.{name}", f"has {value!r}, which {message}")
        for claim, path in self.volumes.items():
            if not path.startswith("/") or ":" in path or ".." in path.split("/"):
                yield Violation(f"{_KEY}.volumes.{claim}", f"is {path!r}, which is not an absolute path")
        repeated_paths = {path for path in self.volumes.values() if list(self.volumes.values()).count(path) > 1}
        for path in sorted(repeated_paths):
            yield Violation(f"{_KEY}.volumes", f"mounts two claims at {path}; give each its own path")
        if self.workdir is not None and not self.workdir.startswith("/"):
            yield Violation(f"{_KEY}.workdir", f"is {self.workdir!r}, which is not an absolute path")

    def _check_variables(self) -> Iterator[Violation]:
        for name in ("env", "secrets"):
            for variable in getattr(self, name):
                if not _VARIABLE.fullmatch(variable):
                    yield Violation(f"{_KEY}.{name}", f"has {variable!r}, which is not the name of a variable")
                elif variable.startswith("PET_") or variable == ATTEMPT:
                    yield Violation(f"{_KEY}.{name}.{variable}", "is set, but the launcher sets it; remove it")
        for variable in sorted(self.env.keys() & self.secrets.keys()):
            yield Violation(f"{_KEY}.secrets.{variable}", "is set together with env; choose one of them")
        for variable, reference in self.secrets.items():
            if not _SECRET_KEY.fullmatch(reference):
                message = "is not of the form SECRET/KEY, the name of a Secret and its key"
                yield Violation(f"{_KEY}.secrets.{variable}", message)

    def _check_placement(self) -> Iterator[Violation]:
        for name in ("labels", "node_selector"):
            yield from _check_labels(name, getattr(self, name))
        for toleration in self.tolerations:
            if not isinstance(toleration, dict) or not toleration.keys() <= _TOLERATION:
                message = f"which is not a toleration; its keys are {', '.join(sorted(_TOLERATION))}"
                yield Violation(f"{_KEY}.tolerations", f"has {toleration}, {message}")


def _check_labels(name: str, labels: dict[str, str]) -> Iterator[Violation]:
    for label, value in labels.items():
        if not (_LABEL.fullmatch(label) and _LABEL_VALUE.fullmatch(value)):
            yield Violation(f"{_KEY}.{name}", f"has {label}={value}, which is not a label in Kubernetes")
        elif label.startswith("foundry/"):
            yield Violation(f"{_KEY}.{name}", f"has {label}, a name that foundry sets; choose another prefix")


def secret_reference(reference: str) -> tuple[str, str]:
    """Return the name of a Secret and its key, given `SECRET/KEY`."""
    name, _, key = reference.partition("/")
    return name, key
