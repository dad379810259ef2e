"""What a run has come to, and what must not depend on how often it was interrupted."""

import json

from safetensors.torch import load_file

from foundry.checkpoint.folder import read_manifest
from foundry.run_dir.checkpoints import find
from foundry.tracking.metrics_file import read_metrics

TIMINGS = {"step_seconds", "samples_per_second", "tokens_per_second", "tflops", "mfu", "peak_memory_bytes"}
TIMINGS |= {"reserved_memory_bytes", "allocator_retries"}


def outcome(run_dir):
    """Every recorded number, checksums of the last checkpoint's tensors and random numbers, and the trainer's state."""
    final = read_manifest(find(run_dir, "last"))
    result = json.loads((run_dir / "result.json").read_text()) if (run_dir / "result.json").is_file() else {}
    result.pop("config_hash", None)
    return {"records": metrics(run_dir), "files": dict(final.files), "state": final.state, "result": result}


def metrics(run_dir):
    """Every recorded number but times and memory."""
    return [{k: v for k, v in record.items() if k not in TIMINGS} for record in read_metrics(run_dir)]


def weights(run_dir):
    """The tensors of the last checkpoint as its files have them, by name."""
    return {
        name: tensor for file in find(run_dir, "last").glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def losses(run_dir):
    """By step, each step once."""
    steps = [record for record in read_metrics(run_dir) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(steps[0]["step"], steps[-1]["step"] + 1))
    return {record["step"]: record["loss"] for record in steps}


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())
