"""Logging of a run's model to MLflow, for `mlflow models serve` and `mlflow.transformers.load_model`."""

import json
import logging
import re
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from foundry.config.command import quoted
from foundry.config.record.frozen import read_recorded
from foundry.core.safe_path import environment_of_module
from foundry.run_dir.names import CHAT_TEMPLATE, TOKENIZER
from foundry.run_dir.redact import one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

_MODEL = "model"
_PACKAGES = ("mlflow", "transformers", "torch", "accelerate")
_TAG = "checkpoint"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = (TOKENIZER, _TOKENIZER_CONFIG, "special_tokens_map.json", CHAT_TEMPLATE)
_log = logging.getLogger(__name__)


def log_model(client: "MlflowClient", run_id: str, run_dir: Path, checkpoint: str, *, trust: bool) -> None:
    """Export a checkpoint and log it in MLflow's transformers flavour, unless it is already logged there.

    Only logs a warning if the export fails.

    The export runs in another process without a GPU, and reads the checkpoint one tensor at a time.

    Args:
        client: client of the store.
        run_id: id of the run that the model belongs to.
        run_dir: the run directory.
        checkpoint: name of the checkpoint's folder, such as `step_00000200`.
        trust: allow parts that are not built in.

    Raises:
        Exception: any exception of MLflow.
    """
    model = _find_model(client, run_id, checkpoint)
    if model is not None and model.status == "READY":
        return
    with TemporaryDirectory(prefix="foundry-model-") as temporary:
        folder, step = Path(temporary) / "export", int(checkpoint.rpartition("_")[2])
        if reason := _export(run_dir, folder, step, trust=trust):
            _log.warning("MLflow: the model of %s is not logged: %s", run_dir, one_line(reason))
            return
        from mlflow.entities import LoggedModelOutput

        if model is None:
            run = client.get_run(run_id).info
            name = re.sub(r"""[/:.%"']""", "_", run.run_name or _MODEL)
            model = client.create_logged_model(run.experiment_id, name, source_run_id=run_id, tags={_TAG: checkpoint})
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
        model_dir = Path(temporary) / _MODEL
        _write(model_dir, folder, model, run_id)
        client.log_model_artifacts(model.model_id, str(model_dir))
        client.finalize_logged_model(model.model_id, "READY")


def _find_model(client: "MlflowClient", run_id: str, checkpoint: str) -> "LoggedModel | None":
    """Return the model that an earlier attempt created for this checkpoint, complete or not, or None."""
    outputs = client.get_run(run_id).outputs
    models = (client.get_logged_model(output.model_id) for output in (outputs.model_outputs if outputs else ()))
    return next((model for model in models if model.tags.get(_TAG) == checkpoint), None)


def _export(run_dir: Path, folder: Path, step: int, *, trust: bool) -> str | None:
    """Export a language model with its tokenizer into `folder`. Return the reason of a failure in one line, or None."""
    words = [f"run={quoted(str(run_dir))}", f"out={quoted(str(folder))}", f"which={step}"]
    peft = (read_recorded(run_dir) or {}).get("peft")
    words += ["merge=true"] if isinstance(peft, dict) and peft.get("method", "none") != "none" else []
    words += ["trust=true"] if trust else []
    process = subprocess.run(
        [sys.executable, "-P", "-m", "foundry.export", *words],
        env={**environment_of_module(), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        return (process.stderr.strip().splitlines() or [f"the export ended with exit code {process.returncode}"])[-1]
    # Without these files, MLflow would download replacements from a hub.
    missing = [name for name in ("config.json", TOKENIZER, _TOKENIZER_CONFIG) if not (folder / name).is_file()]
    return f"its export has no {' and no '.join(missing)}" if missing else None


def _write(model_dir: Path, folder: Path, model: "LoggedModel", run_id: str) -> None:
    """Write the files of MLflow's transformers flavour to `model_dir`, and move the export in `folder` there.

    `mlflow.transformers.save_model` would import torch, copy the weights and, in MLflow 3.17 with transformers 5.18 or
    later, fail: it expects the class of a pipeline from transformers, which returns its name.
    """
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    text = Schema([ColSpec(DataType.string)])
    mlflow_model = Model(model.artifact_location, run_id, model_uuid=model.model_id, model_id=model.model_id)
    mlflow_model.add_flavor(
        "transformers",
        transformers_version=version("transformers"),
        code=None,
        task="text-generation",
        instance_type="TextGenerationPipeline",
        torch_dtype=None,
        pipeline_model_type=json.loads((folder / "config.json").read_text())["architectures"][0],
        source_model_name=_MODEL,
        model_binary=_MODEL,
        components=["tokenizer"],
        tokenizer_type=json.loads((folder / _TOKENIZER_CONFIG).read_text())["tokenizer_class"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns that there is no input example
        pyfunc.save_model(
            path=str(model_dir),
            loader_module="mlflow.transformers",
            mlflow_model=mlflow_model,
            signature=ModelSignature(inputs=text, outputs=text),
            pip_requirements=[f"{name}=={version(name)}" for name in _PACKAGES],
        )
    tokenizer_dir = model_dir / "components" / "tokenizer"
    tokenizer_dir.mkdir(parents=True)
    for file in folder.iterdir():
        if file.name in _TOKENIZER_FILES:
            shutil.copy(file, tokenizer_dir)
    folder.rename(model_dir / _MODEL)
