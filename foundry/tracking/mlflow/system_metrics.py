"""System metrics during training from MLflow's monitor: processors, memory, disk and GPUs.

The monitor's thread runs in the store process, on the machine of rank 0.
"""

import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

_THREAD = "SystemMetricsMonitor"
_log = logging.getLogger(__name__)


class SystemMetrics:
    """Wrapper of MLflow's monitor, which samples every 10 seconds or MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.

    Args:
        uri: URI of the store.
        run_id: id of the run that receives the metrics `system/...`.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self._uri, self._run_id = uri, run_id
        self._monitor: SystemMetricsMonitor | None = None
        self._is_possible = True

    def maintain(self, *, ends: bool = False) -> None:
        """Start the monitor; restart it if its thread has ended, as after a failed request. Stop it if `ends`."""
        if ends:
            if self._monitor is not None:
                self._monitor.finish()  # type: ignore[no-untyped-call]
            self._monitor = None
        elif self._is_possible and not any(thread.name == _THREAD for thread in threading.enumerate()):
            try:
                from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

                options: dict[str, Any] = {"resume_logging": True, "tracking_uri": self._uri}
                self._monitor = SystemMetricsMonitor(self._run_id, **options)  # type: ignore[no-untyped-call]
            except ImportError as error:
                self._is_possible = False
                _log.warning("MLflow: no system metrics: %s", error)
            else:
                self._monitor.start()  # type: ignore[no-untyped-call]
