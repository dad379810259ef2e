"""Progress as JSON lines on standard output, for other programs: `tracking.progress=json`."""

import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.run_dir.redact import masked, printable
from foundry.run_dir.strict_json import encode
from foundry.tracking.metrics_file import evaluation_record, step_record
from foundry.tracking.mlflow.destination import viewing_hint
from foundry.tracking.safe_observer import tolerant

_PLAN_FIELDS = (
    "total_steps",
    "total_samples",
    "tokens_per_sample",
    "global_batch_size",
    "world_size",
    "accum_freq",
    "parameters",
    "trainable_parameters",
)


class JsonProgress:
    """Observer that writes each event of a run as one line of JSON.

    Every object has `event` (start, step, evaluation or end), `time` (UTC, ISO 8601) and `run_dir`, which distinguishes
    the jobs of a sweep. The output is strict JSON: NaN and the infinities are "NaN", "Infinity" and "-Infinity", as in
    metrics.jsonl.

    Args:
        stream: stream to write to; None for standard output.
    """

    def __init__(self, *, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._start_event: RunStarted | None = None
        self._start_time = time.monotonic()

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Write the main values of the plan, the name of the metric, the configuration hash and the devices."""
        self._start_event, self._start_time = event, time.monotonic()
        plan = {name: event.plan[name] for name in _PLAN_FIELDS if name in event.plan}
        metadata = {"metric": event.metric, "config_hash": event.config_hash, "devices": event.devices}
        self._write("start", {"step": event.step, **plan, **metadata})

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Write the step's fields of metrics.jsonl, the number of steps of the run, and the remaining seconds."""
        total = None if self._start_event is None else self._start_event.plan.get("total_steps")
        eta_seconds = None if total is None else (total - event.step) * event.step_seconds
        self._write("step", step_record(event) | {"total_steps": total, "eta_seconds": eta_seconds})

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Write the evaluation's fields of metrics.jsonl, and the path of the samples."""
        file = event.samples_file
        self._write("evaluation", evaluation_record(event) | {"samples_file": None if file is None else str(file)})

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Write the final state of the run and its result."""
        fields: dict[str, Any] = {"state": event.state, "reason": printable(event.reason), "result": event.result}
        fields["seconds"] = round(time.monotonic() - self._start_time, 3)
        tracking = {} if self._start_event is None else self._start_event.config.get("tracking") or {}
        if self._start_event is not None and tracking.get("mlflow"):
            fields["mlflow"] = viewing_hint(self._start_event.run_dir, tracking.get("uri"))
        self._write("end", fields)

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        base = {
            "event": event,
            "time": now,
            "run_dir": None if self._start_event is None else str(self._start_event.run_dir),
        }
        stream = self._stream or sys.stdout
        stream.write(
            encode(masked({**base, **{name: value for name, value in fields.items() if name not in base}})) + "\n"
        )
        stream.flush()
