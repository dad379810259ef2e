"""Strict checks of Kubernetes manifests: an unknown field is an error, as it is for `kubectl apply --validate=strict`.

TrainJobs are checked against the definition in `tests/stored/kubeflow`, other resources by kubernetes-validate.
"""

import re
from functools import cache
from pathlib import Path

import yaml

DEFINITION = Path(__file__).parents[1] / "stored" / "kubeflow" / "trainjobs.yaml"
VERSION = "1.37"
METADATA = {"name", "namespace", "labels", "annotations", "ownerReferences"}


class InvalidManifest(Exception):
    """A manifest that an API server would refuse."""


def check_manifest(manifest):
    """Raise InvalidManifest if an API server would refuse a manifest, or drop one of its fields."""
    metadata = manifest["metadata"]
    if unknown := metadata.keys() - METADATA:
        raise InvalidManifest(f"metadata has no field {sorted(unknown)}")
    if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", metadata["name"]) or len(metadata["name"]) > 63:
        raise InvalidManifest(f"{metadata['name']} is no RFC 1035 label")
    for label, value in metadata.get("labels", {}).items():
        if not re.fullmatch("([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", label) or len(value) > 63:
            raise InvalidManifest(f"{label}={value} is no label")
    if manifest["kind"] == "TrainJob":
        _check_trainjob(manifest)
    else:
        _check_built_in(manifest)


def _check_trainjob(manifest):
    error = next(_trainjob_validator().iter_errors(manifest), None)
    if error is not None:
        raise InvalidManifest(f"{error.json_path}: {error.message}")
    spec = manifest["spec"]
    # Rules of the trainer's webhook: pkg/runtime/framework/plugins in the repository of the definition.
    for variable in spec["trainer"].get("env", []):
        if variable["name"].startswith("PET_"):
            raise InvalidManifest(f"{variable['name']} is reserved")
    for patch in spec.get("runtimePatches", []):
        if not re.fullmatch("[a-z0-9.-]+/[A-Za-z0-9._~/-]+", patch["manager"]):
            raise InvalidManifest(f"{patch['manager']} is no domain-prefixed path")
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            containers = job["template"]["spec"]["template"]["spec"].get("containers", [])
            if job["name"] != "node" or any(item["name"] != "node" or "env" in item for item in containers):
                raise InvalidManifest("the runtime torch-distributed has one job and container, node, without env")


def _check_built_in(manifest):
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise InvalidManifest(f"{error.json_path}: {error.message}") from None
    if manifest["kind"] != "Job":
        return
    # Rules of the API server that its schema does not contain: pkg/apis/batch/validation in kubernetes/kubernetes.
    spec = manifest["spec"]
    pod = spec["template"]["spec"]
    if "podFailurePolicy" in spec and pod["restartPolicy"] != "Never":
        raise InvalidManifest("podFailurePolicy requires restartPolicy Never")
    names = {container["name"] for container in pod["containers"]}
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        if on_exit := rule.get("onExitCodes"):
            values = on_exit["values"]
            if on_exit["containerName"] not in names or values != sorted(set(values)) or 0 in values:
                raise InvalidManifest(f"{rule} is no valid rule")
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        if missing := {mount["name"] for mount in container.get("volumeMounts", [])} - volumes:
            raise InvalidManifest(f"there is no volume {sorted(missing)}")


@cache
def _trainjob_validator():
    import jsonschema

    definition = yaml.load(DEFINITION.read_text(), Loader=yaml.CSafeLoader)
    (version,) = definition["spec"]["versions"]
    return jsonschema.Draft202012Validator(_strict(version["schema"]["openAPIV3Schema"]))


def _strict(node):
    """Return a schema that allows no unknown field, except below metadata of the resource."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {name: _strict(value) for name, value in node.items()}
    is_open = "additionalProperties" in node or node.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(node.get("properties"), dict) and node.get("type") == "object" and not is_open:
        strict["additionalProperties"] = False
    return strict
