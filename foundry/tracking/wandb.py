"""Weights & Biases."""

import hashlib
import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foundry.config.configured import configured_by
from foundry.config.schemas.own_trackers import WandB as WandBSettings
from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.run_dir.redact import masked
from foundry.tracking.metric_groups import begins_grouped, evaluation_values, step_values

log = logging.getLogger(__name__)


class WandB:
    """Keeps a run's configuration and metrics in Weights & Biases; needs the extra `wandb`.

    It never asks for a key: that is WANDB_API_KEY, or what `wandb login` has stored; without one the run is recorded
    offline. In offline mode nothing goes over the network, and `wandb sync RUN_DIR/wandb/offline-run-*` sends it later.

    Args:
        settings: names of project and run, and the mode; WANDB_MODE stands in for its default.
        run_dir: the run directory, which also gives the run its identity there.
    """

    @configured_by(WandBSettings)
    def __init__(self, settings: WandBSettings, *, run_dir: Path) -> None:
        self.settings, self._run_dir = settings, Path(run_dir).absolute()
        self._mode = settings.mode or os.environ.get("WANDB_MODE", "online")
        self._run: Any = None
        self._is_grouped = True

    def on_start(self, event: RunStarted) -> None:
        """Begin the run, or continue with it where it was recorded before."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb reports its own crashes over the network
        import wandb

        logging.getLogger("wandb").propagate = False  # its notes on itself have a file of their own
        if self._mode == "online" and not _has_key():
            message = (
                "no key for Weights & Biases (WANDB_API_KEY, or `wandb login`): recorded offline; send it with: %s"
            )
            log.warning(message, f"wandb sync {self._run_dir}/wandb/offline-run-*")
            self._mode = "offline"
        self._is_grouped = begins_grouped(self._run_dir / "wandb")
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
            # The command line, the code and the terminal's lines may hold what only foundry knows to be secret.
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
        """Record how the run ended, and close it."""
        if self._run is not None:
            self._run.summary.update({"state": event.state, "reason": masked({"reason": event.reason})["reason"]})
            self._run.finish(exit_code=0 if event.state == "finished" else 1)

    def _log(self, record: dict[str, Any]) -> None:
        self._run.log(record, step=record.pop("step"))


def _has_key() -> bool:
    """Whether wandb will find a key without asking for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
