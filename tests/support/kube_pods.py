"""Jobs of a stub cluster: each pod is a process on this machine, with the command and environment of its manifest."""

import os
import random
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

INDEX = "batch.kubernetes.io/job-completion-index"
UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
MASTER_PORT = "29500"


def expanded(text, variables):
    """Return the text of a command or variable with the values of `$(NAME)`, as Kubernetes passes it to a container."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[1] is None else variables.get(found[1], found[0]),
        text,
    )


class Pod:
    """A process and the pod that the cluster shows for it.

    Args:
        job: the job that it belongs to.
        index: completion index.
    """

    def __init__(self, job, index):
        suffix = "".join(random.choices(string.ascii_lowercase, k=5))
        self.name, self.index = f"{job.name}-{index}-{suffix}", index
        self.labels = job.pod_template["metadata"]["labels"]
        self.log = job.folder / f"{self.name}.log"
        self.environment = job.environment(index)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [expanded(word, self.environment) for word in job.command],
                cwd=job.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, signum):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    @property
    def exit_code(self):
        """Exit code as a container reports it, 128 + number for a signal; None while the process runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def as_object(self):
        code = self.exit_code
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": "Error"}}
        return {
            "metadata": {"name": self.name, "labels": self.labels, "annotations": {INDEX: str(self.index)}},
            "spec": {"nodeName": f"node-{self.index}"},
            "status": {"phase": phase, "containerStatuses": [{"name": "node", "state": state}]},
        }


class JobController(threading.Thread):
    """Runs the pods of a Job or a TrainJob until it has ended or was deleted, and keeps its status up to date.

    Args:
        cluster: the KubeServer.
        manifest: the job as it is stored.
        folder: folder for the output of pods, and their working directory.
    """

    def __init__(self, cluster, manifest, folder):
        super().__init__(name=manifest["metadata"]["name"], daemon=True)
        self.cluster, self.manifest, self.folder = cluster, manifest, folder
        self.is_trainjob = manifest["kind"] == "TrainJob"
        self.spec = manifest["spec"]
        self.deleted = threading.Event()
        self.pods, self.current, self.num_failures = [], {}, 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = str(listener.getsockname()[1])

    @property
    def pod_template(self):
        if not self.is_trainjob:
            return self.spec["template"]
        (patch,) = self.spec["runtimePatches"]
        return patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]

    @property
    def container(self):
        return self.spec["trainer"] if self.is_trainjob else self.pod_template["spec"]["containers"][0]

    @property
    def num_nodes(self):
        return self.spec["trainer"]["numNodes"] if self.is_trainjob else self.spec["completions"]

    @property
    def command(self):
        return self.container["command"]

    def environment(self, index):
        """Return the environment of a pod: that of the image, and the variables of the manifest."""
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{Path(shutil.which('sh')).parent}",
            "HOME": str(self.folder),
        }
        for source in self.container.get("envFrom", []):
            variables |= self.cluster.secrets[source["secretRef"]["name"]]
        for item in self.container.get("env", []):
            is_text = "value" in item
            text = expanded(item["value"], variables) if is_text else self._referred(item["valueFrom"], index)
            variables[item["name"]] = text
        if self.is_trainjob:  # as pkg/runtime/framework/plugins/torch in the repository of the trainer
            variables |= {
                "PET_NNODES": str(self.num_nodes),
                "PET_NPROC_PER_NODE": str(self.spec["trainer"]["numProcPerNode"]),
                "PET_NODE_RANK": str(index),
                "PET_MASTER_ADDR": f"{self.name}-node-0-0.{self.name}",
                "PET_MASTER_PORT": MASTER_PORT,
            }
        # All pods share the loopback address, so each job gets another port.
        assert variables["PET_MASTER_PORT"] == MASTER_PORT
        return variables | {
            "PET_MASTER_ADDR": self._resolved(variables["PET_MASTER_ADDR"]),
            "PET_MASTER_PORT": self.port,
        }

    def _referred(self, source, index):
        if "fieldRef" in source:
            values = {f"metadata.annotations['{INDEX}']": str(index), UID: self.manifest["metadata"]["uid"]}
            return values[source["fieldRef"]["fieldPath"]]
        reference = source["secretKeyRef"]
        return self.cluster.secrets[reference["name"]][reference["key"]]

    def _resolved(self, host):
        """Return the address of a host name as the cluster's DNS does: through a headless Service."""
        if host == "localhost" or (self.is_trainjob and host == f"{self.name}-node-0-0.{self.name}"):
            return "127.0.0.1"
        pod, _, subdomain = host.partition(".")
        service = self.cluster.get("", "services", subdomain)
        selects_job = service["spec"] == service["spec"] | {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": self.name},
        }
        is_name_of_pod = self.pod_template["spec"].get("subdomain") == subdomain and pod == f"{self.name}-0"
        return "127.0.0.1" if selects_job and is_name_of_pod else "unknown.invalid"

    def run(self):
        if "kueue.x-k8s.io/queue-name" in self.manifest["metadata"]["labels"]:
            self._set("Suspended", "JobSuspended")
            while not self.cluster.admitted.wait(0.05):
                if self.deleted.is_set():
                    break
            self.manifest["status"] = {}
        while not self.deleted.is_set() and (missing := set(range(self.num_nodes)) - self._succeeded()):
            for index in missing - self.current.keys():
                self.current[index] = Pod(self, index)
                self.pods.append(self.current[index])
            if end := self._handle_exits():
                self._stop()
                self._set("Failed", *end)
                return
            time.sleep(0.05)
        if not self.deleted.is_set():
            self._set("Complete", "CompletionsReached")
            self.deleted.wait()
        self._stop()
        self.cluster.remove(self.manifest)

    def _succeeded(self):
        return {pod.index for pod in self.pods if pod.exit_code == 0}

    def _handle_exits(self):
        """Apply the failure policy to pods that have failed; return reason and message if the job has failed."""
        for index, pod in list(self.current.items()):
            code = pod.exit_code
            if not code:
                continue
            action = self._action(code)
            if action == "FailJob":
                return "PodFailurePolicy", f"Container node for pod {pod.name} failed with exit code {code}"
            self.num_failures += action == "Count"
            if self.num_failures > self.spec.get("backoffLimit", 0 if self.is_trainjob else 6):
                return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
            del self.current[index]
        return None

    def _action(self, code):
        for rule in self.spec.get("podFailurePolicy", {"rules": []})["rules"]:
            if code in rule.get("onExitCodes", {"values": []})["values"]:
                return rule["action"]
        return "Count"

    def _stop(self):
        """Send SIGTERM to all pods, SIGKILL after their grace period."""
        for pod in self.current.values():
            pod.signal(signal.SIGTERM)
        seconds = self.pod_template["spec"]["terminationGracePeriodSeconds"]
        for pod in self.current.values():
            try:
                pod.process.wait(seconds)
            except subprocess.TimeoutExpired:
                pod.signal(signal.SIGKILL)

    def _set(self, kind, reason, message=""):
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        self.manifest["status"] = {"conditions": [condition]}
