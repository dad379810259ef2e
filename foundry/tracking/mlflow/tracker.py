"""MLflow tracker; sends records from a separate process."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundry.config.configured import configured_by
from foundry.config.schemas.built_in_trackers import MLflow as MLflowSettings
from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.run_dir.checkpoints import find
from foundry.run_dir.names import CONFIG, MLFLOW_PENDING, PLAN, PLOTS, RESULT
from foundry.run_dir.redact import masked
from foundry.tracking.metric_groups import best_name, evaluation_name, evaluation_values, step_name, step_values
from foundry.tracking.mlflow.destination import Destination, sync_command, tracking_uri
from foundry.tracking.mlflow.parent_link import ParentLink
from foundry.tracking.mlflow.process import RemoteStore
from foundry.tracking.mlflow.queue import Delivery
from foundry.tracking.mlflow.store import Operation
from foundry.tracking.provenance import provenance
from foundry.tracking.safe_observer import tolerant

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "paused": "KILLED", "stopped": "KILLED", "requeued": "KILLED"}
_NOTE_TAG = "mlflow.note.content"
_SAMPLES = ("samples", step_name("samples"))
_COMPARED = (
    "loss",
    "val_loss",
    step_name("loss"),
    evaluation_name("val_loss"),
)  # logged first, since MLflow's comparison of runs opens with the first metric


class MLflowTracker:
    """Tracker that logs parameters, tags, metrics, figures, configuration and result of a run to MLflow.

    It waits for the server only at the end: MLflow is imported in a separate process, which may be killed or hang
    (`foundry.tracking.mlflow.process`). Undelivered records are kept in `mlflow_pending.jsonl` in the run directory,
    and sent by the next start of the run or by `python -m foundry.sync dir=RUN_DIR`. The tracker uploads files that
    other observers write, so it comes after these observers.

    Args:
        settings: names of store, experiment and run (MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME replace the
            defaults), tags, which override foundry's own, and timeouts; creating a new database alone takes seconds, on
            a busy machine tens of seconds.
        run_dir: the run directory; if it already belongs to a run in the store, that run is continued.
    """

    @configured_by(MLflowSettings)
    def __init__(self, settings: MLflowSettings, *, run_dir: Path) -> None:
        self.settings, self._run_dir, self._uri = settings, Path(run_dir), tracking_uri(settings.uri)
        self._delivery: Delivery | None = None
        self._is_grouped = True

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Start the delivery. Connecting happens in the background."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        link = ParentLink.load(self._run_dir)
        name = self.settings.run_name or (self._run_dir.absolute().name if link is None else link.run_name)
        destination = Destination.of(
            self._run_dir,
            uri=self._uri,
            experiment_name=self.settings.experiment_name,
            run_name=name,
            sweep_dir=None if link is None else self._run_dir / link.sweep,
        )
        destination.save(self._run_dir)
        self._is_grouped = destination.is_grouped
        self._delivery = Delivery(
            store=RemoteStore(self._run_dir, destination, system_metrics=self.settings.system_metrics),
            pending_file=self._run_dir / MLFLOW_PENDING,
            prepare=lambda: self._initial_operations(event, link, Path.cwd()),
            finish_seconds=self.settings.model_seconds if self.settings.log_model else self.settings.finish_seconds,
            send_hint=f"send them with: {sync_command(self._run_dir, self._uri)}",
        )
        self._delivery.start()

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Queue the step's metrics."""
        self._put_metrics(event.step, step_values(event, is_grouped=self._is_grouped))

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Queue the held-out metrics and the current figures."""
        self._put_metrics(event.step, evaluation_values(event, is_grouped=self._is_grouped))
        self._put_files(PLOTS)
        if event.samples_file is not None and event.samples_file.parent != self._run_dir / PLOTS:
            file = os.path.relpath(event.samples_file, self._run_dir)
            self._put({"op": "artifact", "file": file, "to": PLOTS})

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Queue the remaining records, wait at most the timeout, and keep undelivered records."""
        if self._delivery is None:
            return
        self._put_best(event.result.get("best"))
        self._put_files(PLOTS)
        self._put_files("")
        if self.settings.log_model and event.state == "finished":
            self._put_model()
        tags = {"state": event.state} | ({"reason": event.reason} if event.reason else {})
        self._put({"op": "tags", "values": masked(tags)})
        self._put({"op": "end", "status": _STATUS.get(event.state, "FAILED"), "time_ms": _now_ms()})
        self._delivery.close()
        self._delivery = None

    def _initial_operations(self, event: RunStarted, link: ParentLink | None, directory: Path) -> Iterator[Operation]:
        """Yield the operations that describe the run. Called in the background, since git and YAML take time.

        A swept group, such as `optimizer`, is not a field of the configuration but is logged as a parameter for
        comparison.
        """
        import yaml

        config = masked(event.config)
        plan = {name: value for name, value in masked(event.plan).items() if isinstance(value, (str, int, float))}
        tags = provenance(directory) | {"config_hash": event.config_hash, "run_dir": str(self._run_dir.absolute())}
        tags |= {} if link is None else link.tags(self._run_dir)
        swept = {} if link is None else link.swept
        yield {"op": "start"}
        note = {} if self.settings.note is None else {_NOTE_TAG: self.settings.note}
        user_tags = masked(dict(self.settings.tags or {}) | note)
        yield {"op": "tags", "values": tags | {str(key): str(value) for key, value in user_tags.items()}}
        yield {"op": "params", "values": {**swept, **flattened(config), **flattened(plan, "plan.")}}
        if event.data is not None:
            counts = event.plan.get("notes") or {}
            profile = {name: value for name, value in masked(counts).items() if isinstance(value, (str, int, float))}
            yield {"op": "data", **masked(event.data), "profile": profile}
        yield {"op": "text", "file": CONFIG, "text": yaml.safe_dump(_plain(config), sort_keys=False)}

    def _put_metrics(self, step: int, record: dict[str, Any]) -> None:
        first = {name: record[name] for name in _COMPARED if name in record}
        last = {name: record[name] for name in _SAMPLES if name in record}
        rest = {name: value for name, value in record.items() if name not in ("step", *last)}
        self._put({"op": "metrics", "time_ms": _now_ms(), "step": step, "values": {**first, **rest, **last}})

    def _put_best(self, best: Mapping[str, Any] | None) -> None:
        """Queue the metrics of the best evaluation under separate names.

        MLflow's tables and plots show the last value of a metric.
        """
        if best is not None:
            format_name = best_name if self._is_grouped else "best_{}".format
            values = {format_name(name): value for name, value in best.items() if name != "step"}
            self._put({"op": "metrics", "time_ms": _now_ms(), "step": best["step"], "values": values})

    def _put_model(self) -> None:
        """Queue the upload of the best checkpoint as a model; of the last checkpoint if there is no best one."""
        for which in ("best", "last"):
            with suppress(FileNotFoundError):
                self._put({"op": "model", "checkpoint": find(self._run_dir, which).name})
                return

    def _put_files(self, folder: str) -> None:
        """Queue uploads of all files in `folder`; for an empty `folder`, of the run directory's plan and result."""
        names = (RESULT, PLAN)
        source = self._run_dir / folder
        for path in sorted(source.iterdir() if source.is_dir() else ()):
            if (
                path.is_file()
                and not path.is_symlink()
                and not path.name.startswith(".")
                and (folder or path.name in names)
            ):
                self._put({"op": "artifact", "file": str(path.relative_to(self._run_dir)), "to": folder})

    def _put(self, operation: Operation) -> None:
        if self._delivery is not None:
            self._delivery.put(operation)


def _plain(value: Any) -> Any:
    """Convert to containers and values that YAML supports; other values become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a configuration to `group.field` → text. A list is one value, null is `None`."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{name}.")
        else:
            flat[name] = str(value)
    return flat


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
