"""Requests to the API of a Kubernetes cluster, through the package `kubernetes`; resources are plain dictionaries."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import urllib3
from kubernetes import client, config

from foundry.config.schemas.kubernetes import Kind, Kubernetes
from foundry.config.schemas.launcher import GROUP
from foundry.core.errors import ConfigError, Violation, first_line, nearest
from foundry.launch.job_state import Unreachable
from foundry.launch.kubernetes.manifests import (
    CONTAINER,
    RESOURCE,
    SWEEP,
    TRAINER_GROUP,
    TRAINER_VERSION,
    TRAINJOBS,
    Manifest,
    runtime_path,
)

_TIMEOUT_SECONDS = 30.0
_PATHS = {Kind.job: ("batch", "v1", "jobs"), Kind.trainjob: (TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS)}
_QUEUE_VERSIONS = ("v1beta2", "v1beta1")
_NOT_INSTALLED = "; its API is not installed in the cluster"
_NOT_FOUND, _CONFLICT, _DENIED, _TOO_MANY, _SERVER_ERROR = 404, 409, (401, 403), 429, 500
_LOG_LINES = 20
_REMEDIES = {401: "; log in to the cluster again", 403: "; ask its administrator for the role in docs/kubernetes.md"}


class Refused(ConfigError):
    """The cluster refuses a request.

    Attributes:
        status: HTTP status, such as 403.
    """

    def __init__(self, status: int, message: str) -> None:
        remedy = _REMEDIES.get(status, "")
        text = f"is kubernetes but the cluster refuses a request (HTTP {status}): {message}{remedy}"
        super().__init__(Violation(GROUP, text))
        self.status = status


class Cluster:
    """Namespace of a cluster, with the jobs of a sweep.

    Every method raises Refused if the cluster refuses the request, and Unreachable if it does not respond.

    Args:
        api: client of the package `kubernetes`.
        namespace: namespace of all resources.
    """

    def __init__(self, api: Any, namespace: str) -> None:
        self.namespace = namespace
        self._core = client.CoreV1Api(api)
        self._objects = client.CustomObjectsApi(api)

    @classmethod
    def connect(cls, settings: Kubernetes) -> Self:
        """Return the cluster of the kubeconfig, or in a pod without one, of the pod's service account.

        Raises:
            ConfigError: there is no kubeconfig, or it does not have the context.
        """
        # The package reads the variable only once, when it is imported.
        key, file = "hydra.launcher.context", os.environ.get("KUBECONFIG")
        try:
            contexts, current = config.list_kube_config_contexts(file)
        except config.ConfigException as error:
            if settings.context is None and (api := _in_pod()) is not None:
                return cls(api, settings.namespace or _namespace_of_pod())
            message = f"has no kubeconfig to be in: {first_line(str(error))}; set KUBECONFIG, or run in a pod"
            raise ConfigError(Violation(key, message)) from None
        by_name = {item["name"]: item for item in contexts}
        name = settings.context or (current or {}).get("name")
        if name not in by_name:
            message = f"is {name}, which the kubeconfig does not have{nearest(str(name), by_name)}"
            raise ConfigError(Violation(key, f"{message}; contexts: {', '.join(by_name)}"))
        namespace = settings.namespace or by_name[name]["context"].get("namespace") or "default"
        try:
            return cls(config.new_client_from_config(file, name, client_configuration=_client_options()), namespace)
        except config.ConfigException as error:
            raise ConfigError(Violation(key, f"is {name}, which is invalid: {first_line(str(error))}")) from None

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create a resource and return it; if the name is taken, return the resource that has it.

        Args:
            manifest: the manifest; its namespace, if any, is this one.
            dry_run: let the cluster check the request, without creating anything.
        """
        options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        namespace, name = self.namespace, manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            create = partial(self._core.create_namespaced_service, namespace, manifest)
            read = partial(self._core.read_namespaced_service, name, namespace)
        else:
            group, version, plural = _PATHS[Kind[manifest["kind"].lower()]]
            create = partial(
                self._objects.create_namespaced_custom_object,
                *(group, version, namespace, plural, manifest),
                field_validation="Strict",
            )
            read = partial(self._objects.get_namespaced_custom_object, group, version, namespace, plural, name)
        try:
            return _request(create, **options)
        except Refused as error:
            if error.status != _CONFLICT:
                raise
        return _request(read)

    def own_service(self, service: Manifest, job: Manifest) -> None:
        """Let the cluster delete a Service together with its Job."""
        metadata = job["metadata"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
        patch = {"metadata": {"ownerReferences": [owner]}}
        _request(self._core.patch_namespaced_service, service["metadata"]["name"], self.namespace, patch)

    def jobs(self, kind: Kind, sweep: str) -> list[Manifest]:
        """Return the jobs of a sweep, given their kind and the value of the sweep's label."""
        group, version, plural = _PATHS[kind]
        answer = _request(
            self._objects.list_namespaced_custom_object,
            group,
            version,
            self.namespace,
            plural,
            label_selector=f"{SWEEP}={sweep}",
        )
        return list(answer["items"])

    def pods(self, sweep: str) -> list[Manifest]:
        """Return the pods of a sweep, given the value of the sweep's label."""
        return list(
            _request(self._core.list_namespaced_pod, self.namespace, label_selector=f"{SWEEP}={sweep}")["items"]
        )

    def delete(self, kind: Kind, name: str, *, kill: bool = False) -> None:
        """Delete a job that may have been deleted already.

        The job remains in the cluster until its pods have ended. They get SIGTERM first, unless `kill` is set.
        """
        group, version, plural = _PATHS[kind]
        try:
            _request(
                self._objects.delete_namespaced_custom_object,
                group,
                version,
                self.namespace,
                plural,
                name,
                propagation_policy="Foreground",
            )
        except Refused as error:
            if error.status != _NOT_FOUND:
                raise
        if kill:
            _request(
                self._core.delete_collection_namespaced_pod,
                self.namespace,
                label_selector=f"{RESOURCE}={name}",
                grace_period_seconds=0,
            )

    def last_output(self, pod: str) -> str:
        """Return the last line of output of a pod; empty without output."""
        with _translated():
            answer = self._core.read_namespaced_pod_log(
                pod,
                self.namespace,
                container=CONTAINER,
                tail_lines=_LOG_LINES,
                _preload_content=False,
                _request_timeout=_TIMEOUT_SECONDS,
            )
        lines = [line.strip() for line in answer.data.decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def check_references(self, settings: Kubernetes) -> Iterator[Violation]:
        """Yield a violation for each namespace, claim, queue, runtime and account that does not exist.

        A resource that this user may not read is not checked.
        """
        if not _exists(self._core.read_namespace, self.namespace):
            message = "which does not exist in the cluster; create it, or choose another"
            yield Violation("hydra.launcher.namespace", f"is {self.namespace}, {message}")
            return
        place = f"in namespace {self.namespace}"
        for claim in settings.volumes:
            if not _exists(self._core.read_namespaced_persistent_volume_claim, claim, self.namespace):
                names = _names(self._core.list_namespaced_persistent_volume_claim, self.namespace)
                yield Violation("hydra.launcher.volumes", f"has {claim}, which is not a claim {place}{names}")
        account = settings.service_account
        if account and not _exists(self._core.read_namespaced_service_account, account, self.namespace):
            names = _names(self._core.list_namespaced_service_account, self.namespace)
            message = f"is {account}, which is not a service account {place}{names}"
            yield Violation("hydra.launcher.service_account", message)
        if settings.queue:
            paths = [("kueue.x-k8s.io", version, self.namespace, "localqueues") for version in _QUEUE_VERSIONS]
            yield from self._check_object("queue", settings.queue, paths, f"local queue of Kueue {place}")
        if settings.kind is Kind.trainjob:
            plural, is_namespaced = runtime_path(settings)
            place_in_path = (self.namespace,) if is_namespaced else ()
            path = (TRAINER_GROUP, TRAINER_VERSION, *place_in_path, plural)
            yield from self._check_object("runtime", settings.runtime, [path], settings.runtime_kind.value)

    def _check_object(self, field: str, name: str, paths: Sequence[tuple[str, ...]], noun: str) -> Iterator[Violation]:
        """Yield a violation if no path, which is one version of the API, has the object."""
        is_namespaced = len(paths[0]) == 4
        read = self._objects.get_namespaced_custom_object if is_namespaced else self._objects.get_cluster_custom_object
        if any(_exists(read, *path, name) for path in paths):
            return
        listing = (
            self._objects.list_namespaced_custom_object if is_namespaced else self._objects.list_cluster_custom_object
        )
        texts = [_names(listing, *path) for path in paths]
        text = next((text for text in texts if text != _NOT_INSTALLED), texts[0])
        yield Violation(f"hydra.launcher.{field}", f"is {name}, which is not a {noun}{text}")


def _in_pod() -> Any:
    """Return a client with the service account of this pod; None outside of a pod."""
    options = _client_options()
    try:
        config.load_incluster_config(client_configuration=options)
    except config.ConfigException:
        return None
    return client.ApiClient(options)


def _client_options() -> Any:
    options = client.Configuration()
    options.retries = 0  # the queue of jobs repeats requests; urllib3 would log each of its retries
    return options


def _namespace_of_pod() -> str:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text(encoding="utf-8").strip()


def _request(function: Callable[..., Any], *arguments: Any, **options: Any) -> Manifest:
    """Return the answer to a request as a dictionary; the models of the package are not used."""
    with _translated():
        answer = function(*arguments, _preload_content=False, _request_timeout=_TIMEOUT_SECONDS, **options)
        content: Manifest = json.loads(answer.data)
    return content


@contextmanager
def _translated() -> Iterator[None]:
    """Raise Refused or Unreachable in place of the errors of a request."""
    try:
        yield
    except client.ApiException as error:
        message = _describe(error)
        if not error.status or error.status >= _SERVER_ERROR or error.status == _TOO_MANY:
            raise Unreachable(message) from None
        raise Refused(error.status, message) from None
    except json.JSONDecodeError:
        raise Unreachable("the answer is not JSON, as from a proxy's login page") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise Unreachable(first_line(str(getattr(error, "reason", error)))) from None


def _describe(error: Any) -> str:
    """Return the message of an error."""
    try:
        return first_line(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return first_line(f"HTTP {error.status} {error.reason}")


def _exists(read: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a resource exists; True if this user may not read it."""
    try:
        _request(read, *arguments)
    except Refused as error:
        if error.status == _NOT_FOUND:
            return False
        if error.status not in _DENIED:
            raise
    return True


def _names(listing: Callable[..., Any], *arguments: Any) -> str:
    """Return a list of resources as `; available: a, b`; empty if this user may not list them."""
    try:
        items = _request(listing, *arguments)["items"]
    except Refused as error:
        return _NOT_INSTALLED if error.status == _NOT_FOUND else ""
    names = [item["metadata"]["name"] for item in items]
    return f"; available: {', '.join(sorted(names))}" if names else "; there is none"
