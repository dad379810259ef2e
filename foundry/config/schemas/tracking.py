"""`tracking=`: what a run tells."""

from dataclasses import dataclass

from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Progress on the terminal, metrics.jsonl, plots and MLflow."""

    log_every_n_steps: int = setting(
        10, "optimizer steps between log lines", ge=1, aliases="logging_steps, log_interval, log_freq, log_every"
    )
    progress: bool = setting(True, "show progress on the terminal", aliases="enable_progress_bar")
    plots: bool = setting(True, "write plots/loss.png and plots/schedule.png at the end")
    mlflow: bool = setting(True, "log to MLflow")
    uri: str | None = setting(None, "MLflow tracking URI; null: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db")
    experiment_name: str = setting("foundry", "MLflow experiment", aliases="project, project_name")
    run_name: str | None = setting(None, "MLflow run; null: the run directory's name, of a job what is swept")
