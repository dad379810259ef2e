"""`hydra/launcher=kubernetes`: the jobs of a sweep on a Kubernetes cluster.

The name of a job's resource is derived from its run directory, and annotations identify the job. So a command that was
killed, or that lost its connection after a request, finds the jobs that it has submitted. The result of a job is read
from its run directory, which is on a volume that the pods share with this machine.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from foundry.config.composition.hydra_application import current_config
from foundry.config.packages import missing_message
from foundry.config.record.frozen import hash_config
from foundry.config.schemas.kubernetes import Kubernetes
from foundry.config.schemas.launcher import GROUP, resolve_launcher
from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError, Violation, counted, first_line
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import JobState, Unreachable
from foundry.launch.kubernetes.manifests import (
    ATTEMPT,
    RESOURCE,
    RUN_DIR,
    Identity,
    Manifest,
    own_annotations,
    resource_name,
    sweep_label,
    write_order,
)
from foundry.launch.kubernetes.states import choose_pod, has_ended, job_state
from foundry.launch.launchers import FrozenLauncher
from foundry.launch.ledger import say
from foundry.run_dir.files import make_folder, read_text, write_atomically
from foundry.run_dir.names import KUBERNETES

if TYPE_CHECKING:
    from foundry.launch.kubernetes.cluster import Cluster

Answer = TypeVar("Answer")

_RETRY_SECONDS = (1.0, 2.0, 4.0)
"""Waits before a request is repeated that creates a resource, which its name makes safe, or that changes its owner."""


class KubernetesLauncher(FrozenLauncher):
    """Launcher that submits jobs to a cluster and waits for them, or only writes their manifests."""

    title = "Kubernetes"
    survives = True

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        super().__init__(work, **settings)
        self._checked_settings: list[Kubernetes] = []
        self._connected: Cluster | None = None

    @property
    def settings(self) -> Kubernetes:
        """The launcher's settings in the configuration of the sweep."""
        return _resolve_settings(self.master)

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Check that the cluster accepts the jobs; nothing is created.

        Raises:
            ConfigError: the cluster does not accept a job, or does not respond; the message has the reason.
        """
        for config in configs:
            settings = _resolve_settings(config)
            if settings in self._checked_settings:
                continue
            identity = _identity(config)
            if violations := list(_check_paths(settings, identity)):
                raise ConfigError(violations)
            if settings.write is None:
                self._check_cluster(settings, identity)
            self._checked_settings.append(settings)

    def start(self, jobs: Sequence[ComposedJob]) -> list[JobReturn]:
        """Run the jobs and return their results, or only write their manifests.

        Raises:
            ConfigError: the cluster refuses a job, or a file of somebody else has the name of a manifest.
            KeyboardInterrupt: Ctrl-C ended the wait.
        """
        if self.settings.write is None:
            return super().start(jobs)
        folder = Path(self.settings.write)
        for job in jobs:
            self.prepare(job)
            _write(folder, _resolve_settings(job.config), _identity(job.config))
        self.detached = True
        command = f"kubectl apply --filename={quote(str(folder))}"
        say(f"{counted(len(jobs), 'job')} written to {folder}; to submit them: {command}")
        return [job.result(detached=True) for job in jobs]

    def submit(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Create the resources of jobs, unless an earlier request without an answer has created them.

        Raises:
            ConfigError: the cluster refuses a job, or its name belongs to somebody else's resource.
            Unreachable: the cluster does not respond; jobs that were created are found by `attach`.
        """
        attempts, ids = _count_attempts(self._resources()), dict[int, str]()
        try:
            for job in jobs:
                resource = self._create(job.config, attempts[str(job.run_dir)] + 1)
                ids[job.index] = self._record(job.run_dir, resource)
        except ConfigError:
            if ids:
                jobs_before = f"{counted(len(ids), 'job')} submitted before the error"
                say(f"{jobs_before} will run; to cancel: {self.cancel_command(ids.values())}")
            raise
        return ids

    def attach(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Return, by job index, the ids of jobs in the cluster that have not ended.

        Raises:
            ConfigError: the cluster runs a job with another configuration in the same run directory.
        """
        by_run_dir, ids = _find_unfinished(self._resources()), dict[int, str]()
        for job in jobs:
            if (present := by_run_dir.get(str(job.run_dir))) is not None:
                _check_own(present, _identity(job.config))
                ids[job.index] = self._record(job.run_dir, present)
        return ids

    def poll(self, ids: Collection[str]) -> dict[str, JobState]:
        """Return the states of jobs, from their resources and pods."""
        with _refusals_as_outages():
            resources, pods = {self._job_id(resource): resource for resource in self._resources()}, self._pods()
        return {name: job_state(resources[name], pods[_name(name)]) for name in ids if name in resources}

    def cancel(self, ids: Collection[str], *, kill: bool = False) -> None:
        """Delete jobs from the cluster; their pods get SIGTERM first unless `kill` is set.

        Raises:
            Unreachable: the cluster does not respond, or refuses the request.
        """
        with _refusals_as_outages():
            for job_id in ids:
                self._cluster().delete(self.settings.kind, _name(job_id), kill=kill)

    def logs(self, job_id: str) -> str:
        """Return the last line of output of a pod of the job; empty if the cluster does not give it."""
        try:
            pod = choose_pod(self._pods()[_name(job_id)])
            return "" if pod is None else self._cluster().last_output(pod)
        except (ConfigError, Unreachable):
            return ""

    def cancel_command(self, ids: Iterable[str]) -> str:
        """Return the `kubectl delete` command for jobs."""
        context = [f"--context={self.settings.context}"] if self.settings.context else []
        return join(["kubectl", "delete", *context, f"--namespace={self._cluster().namespace}", *ids])

    def _cluster(self) -> "Cluster":
        """Return the cluster; the first call connects to it.

        Raises:
            ConfigError: the package `kubernetes` is not installed, or the kubeconfig does not have the context.
        """
        if self._connected is None:
            try:
                from foundry.launch.kubernetes.cluster import Cluster
            except ModuleNotFoundError as error:
                if error.name != "kubernetes":
                    raise
                message = missing_message("kubernetes", "kubernetes")
                remedy = "or set hydra.launcher.write=DIR, which only writes the manifests"
                raise ConfigError(Violation(GROUP, f"is kubernetes, which {message}; {remedy}")) from None
            self._connected = Cluster.connect(self.settings)
        return self._connected

    def _check_cluster(self, settings: Kubernetes, identity: Identity) -> None:
        """Let the cluster check the manifests of a job, after a check of the resources that they refer to.

        Raises:
            ConfigError: a resource does not exist, or the cluster refuses a request or does not respond.
        """
        cluster = self._cluster()
        try:
            if violations := list(cluster.check_references(settings)):
                raise ConfigError(violations)
            resources, run_dir = self._resources(), str(identity.run_dir)
            if (present := _find_unfinished(resources).get(run_dir)) is not None:
                _check_own(present, identity)
            for manifest in write_order(settings, identity, _count_attempts(resources)[run_dir] + 1):
                _check_own(cluster.create(manifest, dry_run=True), identity)
            self._pods()
        except Unreachable as error:
            message = f"is kubernetes but the cluster does not respond: {first_line(str(error))}"
            raise ConfigError(Violation(GROUP, message)) from None

    def _create(self, config: DictConfig, attempt: int) -> Manifest:
        """Create the resources of a job, and return the Job or TrainJob."""
        cluster, identity = self._cluster(), _identity(config)
        resources = list[Manifest]()
        for manifest in write_order(_resolve_settings(config), identity, attempt):
            resources.append(_repeat(partial(cluster.create, manifest)))
            _check_own(resources[-1], identity)
        *services, job = resources
        for service in services:
            _repeat(partial(cluster.own_service, service, job))
        return job

    def _record(self, run_dir: Path, resource: Manifest) -> str:
        """Write the resource of a job to its run directory, for reports; return the id of the job."""
        job_id = self._job_id(resource)
        record = {"job_id": job_id, "namespace": self._cluster().namespace}
        write_atomically(run_dir / KUBERNETES, json.dumps(record) + "\n")
        return job_id

    def _resources(self) -> list[Manifest]:
        """Return the jobs of the sweep in the cluster."""
        return self._cluster().jobs(self.settings.kind, self._sweep_label)

    def _pods(self) -> dict[str, list[Manifest]]:
        """Return the pods of the sweep by the name of their job."""
        pods = defaultdict[str, list[Manifest]](list)
        for pod in self._cluster().pods(self._sweep_label):
            pods[pod["metadata"]["labels"].get(RESOURCE, "")].append(pod)
        return pods

    def _job_id(self, resource: Manifest) -> str:
        """Return the id of a job, as kubectl takes it: `job/NAME` or `trainjob/NAME`."""
        return f"{self.settings.kind.value}/{resource['metadata']['name']}"

    @property
    def _sweep_label(self) -> str:
        return sweep_label(self.settings, Path(self.sweep_dir).absolute())


def _resolve_settings(config: DictConfig) -> Kubernetes:
    settings = resolve_launcher(config)
    assert isinstance(settings, Kubernetes)
    return settings


def _identity(config: DictConfig) -> Identity:
    with current_config(config):
        sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        run_dir = sweep_dir / str(config.hydra.sweep.subdir)
        config_hash = hash_config(to_config(config))
    return Identity(sweep_dir=sweep_dir, run_dir=run_dir, index=int(config.hydra.job.num), config_hash=config_hash)


def _check_paths(settings: Kubernetes, identity: Identity) -> Iterator[Violation]:
    """Check that the directories of the sweep and of a job are on a volume, and that manifests can be written."""
    for key, path in (("hydra.sweep.dir", identity.sweep_dir), ("hydra.sweep.subdir", identity.run_dir)):
        real_path = Path(os.path.abspath(path))  # noqa: PTH100 # without `..`, but with symlinks
        volumes = settings.volumes.values()
        if not any(path.is_relative_to(volume) and real_path.is_relative_to(volume) for volume in volumes):
            message = "which is on no volume of the jobs; mount the claim that contains it, at the same path as here"
            yield Violation(key, f"is {real_path}, {message}: +hydra.launcher.volumes.CLAIM=PATH")
            return
    if settings.write is not None:
        folder = Path(settings.write).absolute()
        nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            message = f"is {folder} but {nearest} is not a folder that you may write to; choose another"
            yield Violation("hydra.launcher.write", message)


def _find_unfinished(resources: Iterable[Manifest]) -> dict[str, Manifest]:
    """Return the jobs that have not ended, by run directory."""
    return {_annotations(resource).get(RUN_DIR, ""): resource for resource in resources if not has_ended(resource)}


def _count_attempts(resources: Iterable[Manifest]) -> defaultdict[str, int]:
    """Return the highest number of a submission that the cluster still has, by run directory; 0 without one."""
    attempts = defaultdict[str, int](int)
    for resource in resources:
        annotations = _annotations(resource)
        run_dir, attempt = annotations.get(RUN_DIR, ""), annotations.get(ATTEMPT, "")
        attempts[run_dir] = max(attempts[run_dir], int(attempt) if attempt.isdecimal() else 0)
    return attempts


def _annotations(resource: Manifest) -> dict[str, str]:
    return resource["metadata"].get("annotations") or {}


def _repeat(request: Callable[[], Answer]) -> Answer:
    """Call a request, and repeat it if there is no answer; return the answer.

    Raises:
        Unreachable: there is no answer to the last request.
    """
    for seconds in _RETRY_SECONDS:
        try:
            return request()
        except Unreachable:
            time.sleep(seconds)
    return request()


@contextmanager
def _refusals_as_outages() -> Iterator[None]:
    """Convert refusals of the cluster to requests of a watch, for example because a token has expired.

    Raises:
        Unreachable: the cluster refuses a request.
    """
    try:
        yield
    except ConfigError as error:
        raise Unreachable(str(error)) from None


def _name(job_id: str) -> str:
    return job_id.partition("/")[2]


def _check_own(resource: Manifest, identity: Identity) -> None:
    """Check that a resource in the cluster belongs to a job.

    Raises:
        ConfigError: it belongs to somebody else, or runs another configuration of the job.
    """
    annotations, name = _annotations(resource), resource["metadata"]["name"]
    if annotations.get(RUN_DIR) != str(identity.run_dir):
        message = f"gives a job the name of {name}, which somebody else created; choose another"
        raise ConfigError(Violation("hydra.launcher.name", message))
    if not own_annotations(identity).items() <= annotations.items():
        message = (
            f"is {identity.sweep_dir}, where {name} runs another configuration; wait for it, or delete it with kubectl"
        )
        raise ConfigError(Violation("hydra.sweep.dir", message))


def _write(folder: Path, settings: Kubernetes, identity: Identity) -> None:
    """Write the manifests of a job to a file, unless the file is not foundry's.

    Raises:
        ConfigError: another file has this name, or the folder cannot be written.
    """
    path = folder / f"{resource_name(settings, identity)}.yaml"
    if os.path.lexists(path) and _read_run_dir(path) != str(identity.run_dir):
        message = f"is {folder}, which contains {path.name} of somebody else; choose another folder"
        raise ConfigError(Violation("hydra.launcher.write", message))
    text = yaml.safe_dump_all(write_order(settings, identity), sort_keys=False, width=10**6)
    try:
        make_folder(folder, parents=True)
        write_atomically(path, text)
    except OSError as error:
        message = f"is {folder}, which cannot be written: {error.strerror or error}; choose another"
        raise ConfigError(Violation("hydra.launcher.write", message)) from None


def _read_run_dir(path: Path) -> str | None:
    """Return the run directory of the manifests in a file; None if they are not foundry's."""
    try:
        manifests = list(yaml.safe_load_all(read_text(path)))
        return str(manifests[-1]["metadata"]["annotations"][RUN_DIR])
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        return None
