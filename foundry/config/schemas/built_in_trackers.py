"""Settings of the built-in trackers, which are selected by `_target_` in `tracking.trackers`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundry.config.setting import setting
from foundry.core.errors import as_text


def _parse_folder(text: str) -> Path:
    """Parse the path of a folder in the run directory.

    Raises:
        ValueError: the path points outside the run directory, or is the run directory.
    """
    path = Path(text)
    if path.is_absolute() or ".." in path.parts or path == Path():
        raise ValueError(f"is {as_text(text)} but must be a folder in the run directory, such as tensorboard")
    return path


def _parse_mode(text: str) -> str:
    """Parse the mode of Weights & Biases.

    Raises:
        ValueError: the text is not `online` or `offline`.
    """
    if text not in ("online", "offline"):
        raise ValueError(f"is {as_text(text)} but must be online, offline or null")
    return text


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Settings of the TensorBoard tracker, which writes event files into the run directory."""

    _target_: str = "foundry.TensorBoard"
    folder: str = setting("tensorboard", "folder in the run directory", parse=_parse_folder)
    flush_seconds: float = setting(
        30.0, "maximum time that events stay in memory before they are written", gt=0, le=10**6
    )


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Settings of the Weights & Biases tracker."""

    _target_: str = "foundry.WandB"
    experiment_name: str = setting("${tracking.experiment_name}", "project in Weights & Biases", alone="foundry")
    run_name: str | None = setting(
        "${tracking.run_name}", "name of the run; null: the name of the run directory", alone=None
    )
    mode: str | None = setting(None, "online or offline; null: WANDB_MODE, else online", parse=_parse_mode)
    entity: str | None = setting(None, "user or team; null: the default of the API key")
    tags: list[str] | None = setting(None, "tags of the run")


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """Settings of the MLflow tracker, including settings that `tracking.mlflow=true` does not offer."""

    _target_: str = "foundry.MLflowTracker"
    uri: str | None = setting("${tracking.uri}", "tracking URI", alone=None)
    experiment_name: str = setting("${tracking.experiment_name}", "experiment in MLflow", alone="foundry")
    run_name: str | None = setting(
        "${tracking.run_name}", "name of the run; null: the name of the run directory", alone=None
    )
    tags: dict[str, Any] | None = setting(None, "further tags by name")
    note: str | None = setting(None, "description of the run")
    system_metrics: bool = setting(False, "record system metrics of rank 0's machine")
    log_model: bool = setting(False, "log the best model of a finished run")
    finish_seconds: float = setting(60.0, "maximum wait for the server at the end of a run", gt=0, le=10**6)
    model_seconds: float = setting(900.0, "maximum wait for a logged model", gt=0, le=10**6)
