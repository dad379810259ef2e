"""`tracking=`: logs, progress display, plots and experiment trackers."""

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from foundry.config.packages import missing_message
from foundry.config.schemas.model import Model
from foundry.config.setting import OnResume, setting
from foundry.core.errors import Violation, as_text

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

EXTRAS = {"foundry.TensorBoard": "tensorboard", "foundry.WandB": "wandb"}
"""Names of optional packages by tracker; foundry's extra of the same name installs the package."""


JSON = "json"
"""Value of `tracking.progress` for JSON output."""


def parse_progress(text: str) -> None:
    """Check a setting that can be true, false or json.

    Raises:
        ValueError: the text is another word.
    """
    if text not in ("True", "False", JSON):
        raise ValueError(f"is {as_text(text)} but must be true, false or json")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Settings of torch's profiler, which writes a trace of each rank to `profile/` in the run directory."""

    first_step: int | None = setting(None, "first optimizer step to record, counted from 1; null: no profile", ge=1)
    num_steps: int = setting(3, "optimizer steps to record", ge=1, le=1000)

    @property
    def steps(self) -> range:
        """Steps that are profiled."""
        return range(0) if self.first_step is None else range(self.first_step, self.first_step + self.num_steps)


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Settings of terminal progress, metrics.jsonl, plots, MLflow and other trackers."""

    offered: ClassVar[tuple[str, ...]] = ("run_dir", "uri", "experiment_name", "run_name")

    log_every_n_steps: int = setting(10, "optimizer steps between log lines", ge=1)
    norms_every_n_steps: int | None = setting(
        None,
        "optimizer steps between measurements of the norms of gradient, weights and update by block; a multiple of "
        "log_every_n_steps; null: no norms",
        ge=1,
    )
    progress: bool | str = setting(
        True,
        "show progress on the terminal; json: write it to standard output as one JSON object per line",
        parse=parse_progress,
    )
    plots: bool = setting(
        True, "draw plots/: loss, metrics, schedule, norms by block if measured, and success of a policy"
    )
    mlflow: bool = setting(True, "log to MLflow")
    uri: str | None = setting(None, "MLflow tracking URI; null: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db")
    experiment_name: str = setting("foundry", "MLflow experiment")
    run_name: str | None = setting(
        None, "name of the MLflow run; null: the name of the run directory, or for a job of a sweep its swept values"
    )
    tags: dict[str, Any] = setting(dict, "further tags of the run in MLflow, as a mapping", on_resume=OnResume.allowed)
    note: str | None = setting(None, "description of the run, shown on its page in MLflow", on_resume=OnResume.allowed)
    system_metrics: bool = setting(
        False,
        "record the use of processors, memory, disk, network and GPUs of rank 0's machine in MLflow; GPUs need "
        "nvidia-ml-py",
        on_resume=OnResume.allowed,
    )
    log_model: bool = setting(
        False,
        "log the best model of a finished run in MLflow, in a form that mlflow models can serve; language models only",
        on_resume=OnResume.allowed,
    )
    profile: Profile = field(default_factory=Profile)
    trackers: dict[str, Any] = setting(
        dict,
        "further trackers by name: each a `_target_` with its arguments, or null",
        on_resume=OnResume.allowed,
    )

    def check(self) -> Iterator[Violation]:
        """Check trackers and their packages, tags, the interval of norms, and that MLflow is on if settings need it."""
        every, logged = self.norms_every_n_steps, self.log_every_n_steps
        if every is not None and every % logged:
            message = f"is {every} but norms are recorded only at logged steps; set a multiple of {logged}"
            yield Violation("tracking.norms_every_n_steps", f"{message}, which is tracking.log_every_n_steps")
        for name in ("system_metrics", "log_model"):
            if getattr(self, name) and not self.mlflow:
                yield Violation(f"tracking.{name}", "is true but MLflow is off; set tracking.mlflow=true")
        for name, value in self.tags.items():
            if isinstance(value, (dict, list)) or value is None:
                message = f"is {as_text(value)} but must be a string or a number"
                yield Violation(f"tracking.tags.{name}", message)
        for name, node in self.trackers.items():
            key = f"tracking.trackers.{name}"
            if node is None:
                continue
            if not isinstance(node, dict) or "_target_" not in node:
                yield Violation(
                    key, f"is {as_text(node)} but must be null or have a _target_, the dotted path of a class"
                )
                continue
            if (extra := EXTRAS.get(str(node["_target_"]))) is not None and find_spec(extra) is None:
                yield Violation(key, missing_message(extra, extra))

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check with `log_model` that checkpoints are saved, and that transformers can load the exported model."""
        if not self.log_model:
            return
        if run.checkpoint.is_off:
            yield Violation("tracking.log_model", "is true but no checkpoint is kept; set checkpoint.save_final=true")
        if is_dataclass(run.model) and not getattr(run.model, "in_transformers", False):
            name = type(run.model).__name__
            message = f"is true but model is {name}, which transformers cannot load; leave it out"
            yield Violation("tracking.log_model", message)
        elif isinstance(run.model, Model):
            for violation in run.model.check_export():
                message = f"is true but transformers cannot load a model with {violation.key}; leave one of them out"
                yield Violation("tracking.log_model", message)
