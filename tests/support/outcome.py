"""Results of a run that must not depend on interruptions."""

import json

from safetensors.torch import load_file

from foundry.checkpoint.folder import read_manifest
from foundry.run_dir.checkpoints import find
from foundry.tracking.metrics_file import read_metrics

TIMINGS = {"step_seconds", "samples_per_second", "tokens_per_second", "tflops", "mfu", "peak_memory_bytes"}
TIMINGS |= {"reserved_memory_bytes", "allocator_retries"}


def outcome(run_dir):
    """Return metrics, checksums of the last checkpoint (tensors and random state), trainer state and result.json."""
    final = read_manifest(find(run_dir, "last"))
    result = json.loads((run_dir / "result.json").read_text()) if (run_dir / "result.json").is_file() else {}
    result.pop("config_hash", None)
    return {"records": metrics(run_dir), "files": dict(final.files), "state": final.state, "result": result}


def metrics(run_dir):
    """Return the recorded metrics without times and memory."""
    return [{k: v for k, v in record.items() if k not in TIMINGS} for record in read_metrics(run_dir)]


def weights(run_dir):
    """Return the tensors of the last checkpoint by name, as stored."""
    return {
        name: tensor for file in find(run_dir, "last").glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def losses(run_dir):
    """Return the loss of each step; assert that each step is recorded exactly once."""
    steps = [record for record in read_metrics(run_dir) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(steps[0]["step"], steps[-1]["step"] + 1))
    return {record["step"]: record["loss"] for record in steps}


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())
