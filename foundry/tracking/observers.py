"""Construction of a run's observers from its configuration."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from foundry.config.build import build
from foundry.config.schemas.built_in_trackers import MLflow
from foundry.config.schemas.tracking import JSON, Tracking
from foundry.core.events import Observer
from foundry.tracking.console_progress import Progress
from foundry.tracking.json_progress import JsonProgress
from foundry.tracking.log_progress import log_progress
from foundry.tracking.metrics_file import MetricsFile
from foundry.tracking.mlflow.tracker import MLflowTracker
from foundry.tracking.plots import Plots
from foundry.tracking.safe_observer import SafeObserver
from foundry.tracking.status_file import StatusFile


def build_observers(config: Tracking, run_dir: Path) -> list[Observer]:
    """Build the configured observers, in order: later ones may read files that earlier ones wrote."""
    observers: list[Observer] = [MetricsFile(run_dir=run_dir), StatusFile(run_dir=run_dir)]
    if config.plots:
        observers.append(Plots(run_dir=run_dir, run_name=config.run_name))
    observers.append(log_progress())
    if config.progress:
        observers.append(JsonProgress() if config.progress == JSON else Progress())
    observers += build_trackers(config, run_dir)
    if config.mlflow and "mlflow" not in config.trackers:
        names = [item.name for item in fields(MLflow) if hasattr(config, item.name)]
        observers.append(MLflowTracker(run_dir=run_dir, **{name: getattr(config, name) for name in names}))
    return observers


def build_trackers(config: Tracking, run_dir: Path) -> list[Observer]:
    """Build the parts of `tracking.trackers`, in order. Exceptions of a part during the run become warnings."""
    offered: dict[str, Any] = {"run_dir": run_dir}
    offered |= {name: getattr(config, name) for name in config.offered if name != "run_dir"}
    chosen = {name: node for name, node in config.trackers.items() if node is not None}
    return [SafeObserver(name, build(node, optional=offered)) for name, node in chosen.items()]
