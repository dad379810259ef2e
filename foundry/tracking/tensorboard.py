"""TensorBoard tracker: event files in the run directory, for `tensorboard --logdir runs`."""

import json
import time
from pathlib import Path
from typing import Any

from foundry.config.configured import configured_by
from foundry.config.schemas.built_in_trackers import TensorBoard as TensorBoardSettings
from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.run_dir.redact import masked
from foundry.tracking.metric_groups import evaluation_values, step_values, uses_grouped_names


class TensorBoard:
    """Tracker that writes metrics as scalars and the configuration as text; needs the extra `tensorboard`.

    A resumed run begins a new file, which makes TensorBoard drop the values of an earlier start for the same steps.

    Args:
        settings: folder of the event files, and interval of flushing.
        run_dir: the run directory.
    """

    @configured_by(TensorBoardSettings)
    def __init__(self, settings: TensorBoardSettings, *, run_dir: Path) -> None:
        self._folder, self._flush_seconds = Path(run_dir) / settings.folder, settings.flush_seconds
        self._writer: Any = None
        self._is_grouped = True

    def on_start(self, event: RunStarted) -> None:
        """Open a file, and write the configuration."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._is_grouped = uses_grouped_names(self._folder)
        self._writer = EventFileWriter(str(self._folder), flush_secs=self._flush_seconds)
        self._write(event.step + 1, session_log=SessionLog(status=SessionLog.START))
        text = json.dumps(masked(event.config), indent=2, default=str)
        self._write(event.step, summary=text_pb("config", "".join(f"    {line}\n" for line in text.splitlines())))

    def on_step(self, event: StepLogged) -> None:
        """Write the step's metrics."""
        self._write_scalars(step_values(event, is_grouped=self._is_grouped))

    def on_evaluation(self, event: Evaluated) -> None:
        """Write the held-out metrics."""
        self._write_scalars(evaluation_values(event, is_grouped=self._is_grouped))

    def on_end(self, event: RunEnded) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write_scalars(self, record: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        step = record.pop("step")
        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.items() if value is not None]
        self._write(step, summary=Summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
