"""Weights & Biases tracker."""

import hashlib
import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foundry.config.configured import configured_by
from foundry.config.schemas.built_in_trackers import WandB as WandBSettings
from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.run_dir.redact import masked
from foundry.tracking.metric_groups import evaluation_values, step_values, uses_grouped_names

log = logging.getLogger(__name__)


class WandB:
    """Tracker that logs a run's configuration and metrics to Weights & Biases; needs the extra `wandb`.

    It never prompts for a key: it uses WANDB_API_KEY or the key stored by `wandb login`. Without a key, the run is
    recorded offline. In offline mode, nothing is sent over the network; `wandb sync RUN_DIR/wandb/offline-run-*`
    uploads the run later.

    Args:
        settings: names of project and run, and the mode; WANDB_MODE replaces the default mode.
        run_dir: the run directory; the id of the run in Weights & Biases is derived from its path.
    """

    @configured_by(WandBSettings)
    def __init__(self, settings: WandBSettings, *, run_dir: Path) -> None:
        self.settings, self._run_dir = settings, Path(run_dir).absolute()
        self._mode = settings.mode or os.environ.get("WANDB_MODE", "online")
        self._run: Any = None
        self._is_grouped = True

    def on_start(self, event: RunStarted) -> None:
        """Begin the run in Weights & Biases; in online mode, continue it if it was recorded before."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb would report its own crashes over the network
        import wandb

        logging.getLogger("wandb").propagate = False  # wandb writes its own log file
        if self._mode == "online" and not _has_key():
            message = (
                "no key for Weights & Biases (WANDB_API_KEY, or `wandb login`): recorded offline; send it with: %s"
            )
            log.warning(message, f"wandb sync {self._run_dir}/wandb/offline-run-*")
            self._mode = "offline"
        self._is_grouped = uses_grouped_names(self._run_dir / "wandb")
        begin: Any = wandb.init
        self._run = begin(
            project=self.settings.experiment_name,
            name=self.settings.run_name or self._run_dir.name,
            entity=self.settings.entity,
            id=hashlib.sha256(str(self._run_dir).encode()).hexdigest()[:16],
            resume="allow" if self._mode == "online" else None,
            dir=self._run_dir,
            config=masked(event.config) | {"plan": masked(event.plan), "config_hash": event.config_hash},
            tags=self.settings.tags,
            mode=self._mode,
            reinit="create_new",
            # The command line, the code and the terminal output may contain secrets that only foundry can mask.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True, init_timeout=30.0
            ),
        )

    def on_step(self, event: StepLogged) -> None:
        """Log the step's metrics."""
        self._log(step_values(event, is_grouped=self._is_grouped))

    def on_evaluation(self, event: Evaluated) -> None:
        """Log the held-out metrics."""
        self._log(evaluation_values(event, is_grouped=self._is_grouped))

    def on_end(self, event: RunEnded) -> None:
        """Record the final state of the run, and close it."""
        if self._run is not None:
            self._run.summary.update({"state": event.state, "reason": masked({"reason": event.reason})["reason"]})
            self._run.finish(exit_code=0 if event.state in ("finished", "paused") else 1)

    def _log(self, record: dict[str, Any]) -> None:
        self._run.log(record, step=record.pop("step"))


def _has_key() -> bool:
    """Return True if wandb will find a key without prompting."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
