"""Start of a run on this machine, in this process or in several new ones."""

import logging
import logging.config
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from foundry.config.environment import detect
from foundry.config.packages import conflict_message
from foundry.config.schemas.root import Config
from foundry.run_dir.lock import RunDirectoryLostError, is_held
from foundry.run_dir.redact import known_secrets, one_line, remember
from foundry.run_dir.status import read_status, write_status

if TYPE_CHECKING:
    from foundry.core.events import Observer
    from foundry.engine.train import RunResult

log = logging.getLogger(__name__)


def start(
    config: Config,
    run_dir: Path,
    job_logging: Mapping[str, Any] | None = None,
    observers: Sequence["Observer"] = (),
) -> "RunResult":
    """Train in this process, or in new processes, one for each rank of this node, if no launcher has started them.

    Args:
        config: the composed configuration, used by every process.
        run_dir: the run directory.
        job_logging: logging configuration of rank 0 if there are several processes, in the format of `logging.config`;
            None for Hydra's configuration of this process.
        observers: additional observers, called after foundry's own; pickled if there are several processes.

    Raises:
        ConfigError: a setting is invalid.
        Stopped: a signal stopped the run after saving.
    """
    _limit_spinning()
    environment = detect()
    if environment.rank == 0 and (conflict := conflict_message()):
        log.warning("%s", conflict)
    from foundry.engine.train import train

    processes = environment.num_processes(config.distributed.nproc_per_node)
    if processes == 1:
        return train(config, run_dir, observers)
    from foundry.launch.local import WorkerFailed, run_local
    from foundry.launch.restarts import Restarts

    if job_logging is None and HydraConfig.initialized():
        job_logging = OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True)  # type: ignore[assignment]
    restarts = Restarts(run_dir, config.distributed.max_restarts)
    while True:
        try:
            result: RunResult = run_local(
                processes, _run_as_rank, config, run_dir, known_secrets(), job_logging, observers
            )
            return result
        except WorkerFailed as failed:
            if failed.kind == RunDirectoryLostError.__name__:
                raise RunDirectoryLostError(run_dir) from None
            if environment.rank == 0 and not is_held(run_dir) and read_status(run_dir).get("state") != "finished":
                write_status(run_dir, state="failed", reason=one_line(str(failed)))
            if not restarts.allow(failed):
                raise


def _run_as_rank(
    config: Config,
    run_dir: Path,
    secrets: Mapping[str, str],
    job_logging: Mapping[str, Any] | None,
    observers: Sequence["Observer"],
) -> "RunResult":
    """Entry point of a rank: mask the parent's secrets, log like the parent on rank 0, and train."""
    from foundry.engine.train import train

    for secret, reference in secrets.items():
        remember(secret, reference)
    if detect().rank == 0 and job_logging:
        logging.config.dictConfig(dict(job_logging))
    return train(config, run_dir, observers)


def _limit_spinning() -> None:
    """Limit the busy-waiting of OpenMP's idle threads if the user has not set it; call this before torch loads OpenMP.

    By default idle threads spin for milliseconds. If one other process is busy on the machine, each of a small model's
    many short loops then waits for the scheduler: 40 times slower. The limit costs nothing on an idle machine.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "10000"
