"""Stub of the API server of a Kubernetes cluster, on the loopback interface: it checks, stores and runs resources."""

import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import yaml

from support.kube_manifests import InvalidManifest, check_manifest
from support.kube_pods import JobController

SERVED = {
    "": {"namespaces", "pods", "services", "persistentvolumeclaims", "serviceaccounts"},
    "batch": {"jobs"},
    "trainer.kubeflow.org": {"trainjobs", "clustertrainingruntimes", "trainingruntimes"},
    "kueue.x-k8s.io": {"localqueues"},
}
VERSIONS = {"": "v1", "batch": "v1", "trainer.kubeflow.org": "v1alpha1", "kueue.x-k8s.io": "v1beta1"}
CLUSTER_WIDE = {"namespaces", "clustertrainingruntimes"}
JOBS = {"jobs", "trainjobs"}
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(self, status, message, kind=""):
        super().__init__(message)
        self.status, self.kind = status, kind


class KubeServer:
    """A cluster with the namespace `team`; a context manager that starts and stops its server.

    Attributes:
        requests: method, path without the query, and status of each answer; `dropped` for one that was not sent.
        faults: (method, part of the path, status); each affects the next request that matches. The status `dropped`
            handles the request and closes the connection without an answer.
        secrets: values by name of the Secret and key.
        admitted: event that lets jobs of a queue start.
    """

    def __init__(self, folder, *, runs_jobs=False):
        self.folder, self.runs_jobs = folder, runs_jobs
        self.requests, self.faults, self.secrets = [], [], {}
        self.admitted = threading.Event()
        self.controllers = {}
        self._objects, self._lock, self._num_created = {}, threading.RLock(), 0
        self.add("", "namespaces", "team")
        self.add("trainer.kubeflow.org", "clustertrainingruntimes", "torch-distributed")
        self.add("", "persistentvolumeclaims", "shared")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self}))
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()
        for controller in self.controllers.values():
            for pod in controller.pods:
                with suppress(OSError):
                    pod.signal(9)

    @property
    def created(self):
        """Paths of successful requests that created something, in order."""
        answers = [(method, path) for method, path, status in self.requests if status in (201, "dropped")]
        return [path for method, path in answers if method == "POST" and "dryRun" not in path]

    def add(self, group, plural, name, **content):
        """Add an object that existed before the test."""
        namespace = "" if plural in CLUSTER_WIDE else "team"
        self._objects[group, plural, namespace, name] = {"metadata": {"name": name, "namespace": namespace}, **content}

    def get(self, group, plural, name):
        return self._objects[group, plural, "team", name]

    def jobs(self, plural="jobs"):
        with self._lock:
            return [item for (_, kind, _, _), item in self._objects.items() if kind == plural]

    def remove(self, manifest):
        with self._lock:
            uid = manifest["metadata"]["uid"]
            owned = [
                key
                for key, item in self._objects.items()
                if item is manifest or any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", []))
            ]
            for key in owned:
                del self._objects[key]

    def answer(self, method, target, body):
        """Handle a request; return status and content."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match = PATH.fullmatch(url.path)
        group = (match and match["group"]) or ""
        if not match or match["plural"] not in SERVED.get(group, ()) or match["version"] != VERSIONS[group]:
            raise ApiError(404, "the server could not find the requested resource")
        namespace, plural, name = match["namespace"] or "", match["plural"], match["name"]
        if namespace and ("", "namespaces", "", namespace) not in self._objects and method != "GET":
            raise ApiError(404, f'namespaces "{namespace}" not found', "namespaces")
        with self._lock:
            if match["log"]:
                return 200, self._pod(name).log.read_text()
            if method == "POST":
                return 201, self._create((group, plural, namespace), json.loads(body), is_dry="dryRun" in query)
            if name is None:
                items = self._select(group, plural, namespace, query.get("labelSelector", ""))
                if method == "DELETE":
                    for pod in items:
                        self._pod(pod["metadata"]["name"]).signal(9)
                return 200, {"kind": "List", "items": items}
            key = (group, plural, namespace, name)
            if key not in self._objects:
                raise ApiError(404, f'{plural} "{name}" not found', plural)
            if method == "PATCH":
                self._objects[key]["metadata"] |= json.loads(body)["metadata"]
            if method == "DELETE":
                self._delete(key)
            return 200, self._objects.get(key, {"kind": "Status"})

    def _create(self, place, manifest, *, is_dry):
        _, plural, namespace = place
        try:
            check_manifest(manifest)
        except InvalidManifest as error:
            raise ApiError(422, str(error)) from None
        if manifest["metadata"].get("namespace", namespace) != namespace:
            raise ApiError(400, "the namespace of the object does not match the namespace of the request")
        key = (*place, manifest["metadata"]["name"])
        if key in self._objects:
            raise ApiError(409, f'{plural} "{key[-1]}" already exists', plural)
        if not is_dry:
            self._num_created += 1
            manifest["metadata"]["uid"] = f"uid-{self._num_created}"
            self._objects[key] = manifest
            if self.runs_jobs and plural in JOBS:
                self.controllers[key] = JobController(self, manifest, self.folder)
                self.controllers[key].start()
        return manifest

    def _delete(self, key):
        if key in self.controllers and self.controllers[key].is_alive():
            self._objects[key]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.controllers[key].deleted.set()
        else:
            self.remove(self._objects[key])

    def _select(self, group, plural, namespace, selector):
        if plural == "pods":
            items = [pod.as_object() for controller in self.controllers.values() for pod in controller.pods]
            items += [item for (_, kind, _, _), item in self._objects.items() if kind == "pods"]
        else:
            items = [item for key, item in self._objects.items() if key[:3] == (group, plural, namespace)]
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        items = [item for item in items if wanted.items() <= item["metadata"].get("labels", {}).items()]
        if group in ("", "batch"):  # items of a list of a built-in kind have no kind
            items = [{name: value for name, value in item.items() if name != "kind"} for item in items]
        return items

    def _pod(self, name):
        return next(pod for controller in self.controllers.values() for pod in controller.pods if pod.name == name)

    def _kubeconfig(self):
        host, port = self._server.server_address
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stub",
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "me", "namespace": "team"}}],
            "clusters": [{"name": "stub", "cluster": {"server": f"http://{host}:{port}"}}],
            "users": [{"name": "me", "user": {}}],
        }


class _Handler(BaseHTTPRequestHandler):
    cluster: KubeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def handle_method(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, query = urlsplit(self.path).path, urlsplit(self.path).query
        fault = next((f for f in self.cluster.faults if f[0] == self.command and f[1] in path), None)
        if "dryRun" in query:
            path += "?dryRun"
            fault = fault if fault and fault[2] != "dropped" else None
        if fault is not None:
            self.cluster.faults.remove(fault)
        try:
            if fault is not None and fault[2] != "dropped":
                raise ApiError(fault[2], "the stub refuses")
            status, content = self.cluster.answer(self.command, self.path, body)
        except ApiError as error:
            status = error.status
            content = {"kind": "Status", "message": str(error), "details": {"kind": error.kind}}
        if fault is not None and fault[2] == "dropped":
            self.cluster.requests.append((self.command, path, "dropped"))
            self.close_connection = True
            return
        self.cluster.requests.append((self.command, path, status))
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_DELETE = do_PATCH = handle_method
