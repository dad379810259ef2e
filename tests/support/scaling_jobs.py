"""Finished jobs of a sweep over model widths and tokens, written as files, with losses of a known law."""

import json
import shutil
from itertools import product
from pathlib import Path

import yaml

from foundry.engine.restore import build_unfilled
from foundry.planning.parameter_counts import count_parameters

STORED = Path(__file__).resolve().parents[1] / "stored" / "run-0.1"
WIDTHS, TOKENS = (16, 32, 64, 128), (10_000, 40_000, 160_000)
E, A, ALPHA, B, BETA = 1.5, 60.0, 0.5, 400.0, 0.6


_counts = {}


def loss_of(parameters, tokens):
    """Return the loss of the known law."""
    return E + A * parameters**-ALPHA + B * tokens**-BETA


def write_job(run_dir, *, width=16, tokens=10_000, changes=None, state="finished", **result):
    """Write the files of a job that has finished, or another state, and return its N, without embeddings and head.

    Args:
        run_dir: new run directory.
        width: hidden size of the model.
        tokens: trained tokens.
        changes: settings by dotted key, such as `data.seq_len`.
        state: state in status.json.
        result: further or other content of result.json; by default, `val_loss` is that of the known law.
    """
    run_dir.mkdir(parents=True)
    config = yaml.safe_load((STORED / "config.yaml").read_text())
    for key, value in {"model.hidden_size": width, "model.intermediate_size": 2 * width, **(changes or {})}.items():
        group, _, name = key.partition(".")
        config[group][name] = value
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(STORED / "tokenizer.json", run_dir)
    (run_dir / "plan.json").write_text(json.dumps({"total_steps": 10, "total_epochs": 0.5}))
    status = json.loads((STORED / "status.json").read_text()) | {"state": state, "step": 10}
    (run_dir / "status.json").write_text(json.dumps(status))
    parameters = _count_parameters(run_dir, width)
    if state == "finished":
        content = {
            "status": state,
            "step": 10,
            "tokens": tokens,
            "val_loss": loss_of(parameters, tokens or 1),
            **result,
        }
        (run_dir / "result.json").write_text(json.dumps(content))
    return parameters


def _count_parameters(run_dir, width):
    """Return the N of a run, built once for each width; other settings of `write_job` do not change it."""
    if width not in _counts:
        _counts[width], _ = count_parameters(build_unfilled(run_dir))
    return _counts[width]


def write_jobs(folder, widths=WIDTHS, tokens=TOKENS):
    """Write a job for each width and number of tokens, and return N and D of each job by its number."""
    sizes = [
        (write_job(folder / str(index), width=w, tokens=d), d) for index, (w, d) in enumerate(product(widths, tokens))
    ]
    return dict(enumerate(sizes))
