"""`from foundry import compose, run`: runs from a script or a notebook, composed and checked as on the command line."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import version
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.composition import compose as composing
from foundry.config.composition.hydra_internals import ConfigLoaderImpl, search_path
from foundry.config.composition.hydra_versions import use_current_behavior
from foundry.config.environment import detect
from foundry.config.schemas.root import Config, to_config
from foundry.config.sources import local_path
from foundry.core.errors import ConfigError, Violation, first_line
from foundry.core.events import Observer
from foundry.core.stop_signals import restored_handlers
from foundry.launch.claim import check_agreed, claim_or_release
from foundry.launch.local import format_trace
from foundry.launch.start import start
from foundry.run_dir.log import NOTICE, RunLog, Terminal, log_to_file
from foundry.run_dir.names import LOG

if TYPE_CHECKING:
    from foundry.engine.train import RunResult

_LOG_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"


def compose(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str | None = None
) -> Config:
    """Compose and check the configuration that the command line would use with the same overrides.

    Hydra's global state is not changed.

    Args:
        overrides: overrides as on the command line, such as `hparams.max_steps=10`, except for Hydra's own keys.
        config_dir: folder with additional options, as with `--config-dir`.
        config_name: primary configuration in `config_dir`, as with `--config-name`; None uses foundry's.

    Raises:
        ConfigError: lists all configuration errors.
    """
    if isinstance(overrides, str):
        raise ConfigError(Violation("overrides", f"is a string but must be a list, such as compose([{overrides!r}])"))
    violations, run_overrides = list[Violation](), list[str]()
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.replace("/", ".").partition(".")[0] == "hydra":
            message = (
                "is a setting of the command line only; pass the run directory to run(), "
                "start sweeps with `python -m foundry -m`"
            )
            violations.append(Violation(key, message))
        else:
            run_overrides.append(override)
    try:
        composed = _compose(run_overrides, config_dir, config_name)
        if composed.hydra.mode is RunMode.MULTIRUN:
            violations.append(Violation("hydra.mode", "is MULTIRUN; start the sweep with `python -m foundry -m`"))
        if not violations:
            return to_config(composed)
    except ConfigError as error:
        violations += error.violations
    except (HydraException, OmegaConfBaseException) as error:
        violations.append(Violation("configuration", first_line(str(error))))
    raise ConfigError(violations)


def run(config: Config, run_dir: str | Path | None = None, *, observers: Sequence[Observer] = ()) -> "RunResult":
    """Train as the command line does: in this process, or in `distributed.nproc_per_node` new processes.

    In the main thread, signals make the run save a checkpoint and stop. If several processes are started, a script must
    call this under `if __name__ == "__main__":`, since each process imports the script.

    Args:
        config: configuration from `compose`.
        run_dir: new or empty folder, or one with an unfinished run, which is resumed; None creates a folder in `runs/`.
        observers: notified of the run's events after foundry's own observers; an exception in an observer ends the run.
            With several processes they are pickled and called in the process of rank 0.

    Raises:
        ConfigError: a setting is invalid. Most errors are found before training, some only during it, such as an
            environment that returns no rewards.
        NonFiniteError: the loss or gradient became NaN or infinite.
        Stopped: a signal was received, and the run is saved unless checkpoints are off; a SystemExit with the shell's
            exit code for this signal.
        WorkerFailed: one of several processes failed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    # Otherwise the signal handlers of a stopped run would stay installed in the script.
    with restored_handlers() if in_main_thread else nullcontext():
        return _run(config, run_dir, observers)


def _run(config: Config, run_dir: str | Path | None, observers: Sequence[Observer]) -> "RunResult":
    environment = detect()
    if run_dir is None:
        check_agreed("run_dir", "runs/${now:}")
    if environment.rank > 0:
        return start(config, Path(os.curdir), observers=observers)  # other ranks use rank 0's directory
    processes = environment.num_processes(config.distributed.nproc_per_node)
    starts_ranks = processes > 1
    if starts_ranks and threading.current_thread() is not threading.main_thread():
        message = f"is {processes} but only the main thread can start processes; call run() there, or set it to 1"
        raise ConfigError(Violation("distributed.nproc_per_node", message))
    composed = _compose([], None) if run_dir is None or starts_ranks else None
    path = composed.hydra.run.dir if composed is not None and run_dir is None else run_dir
    local_path("run_dir", str(path))  # refuses URLs
    try:
        with claim_or_release(str(path), "run_dir") as claim, _log_to_run_dir(claim.folder):
            job_logging = None if composed is None else _job_logging(composed, claim.folder)
            return start(config, claim.folder, job_logging, observers)
    except ConfigError as error:
        raise ConfigError(
            replace(violation, key="run_dir") if violation.key == "hydra.run.dir" else violation
            for violation in error.violations
        ) from None


def _compose(overrides: list[str], config_dir: str | Path | None, config_name: str | None = None) -> DictConfig:
    """Compose the configuration, including Hydra's own part, without changing Hydra's global state."""
    composing.install()
    folders = search_path(composing.config_dir())
    composing.add_options_of_tasks(folders)
    if config_dir is not None:
        folder = Path(config_dir).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(Violation("config_dir", f"is {config_dir}, which is not a folder"))
        folders.prepend("foundry.compose", f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    setup_globals()  # registers Hydra's resolvers
    base = version.VersionBase.instance()
    previous_base = base.version_base
    use_current_behavior()
    try:
        loader = ConfigLoaderImpl(config_search_path=folders)
        return loader.load_configuration(config_name or composing.CONFIG_NAME, overrides, RunMode.RUN, from_shell=False)
    finally:
        base.version_base = previous_base


def _job_logging(composed: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Return the logging configuration for rank 0, which runs in a separate process."""
    OmegaConf.update(composed, "hydra.runtime.output_dir", str(run_dir), force_add=True)
    settings: Any = OmegaConf.to_container(composed.hydra.job_logging, resolve=True)
    return dict(settings)


@contextmanager
def _log_to_run_dir(run_dir: Path) -> Iterator[None]:
    """Context manager that also writes log records to foundry.log; log levels are not changed."""
    root = logging.getLogger()
    handlers: list[logging.Handler] = [RunLog(run_dir / LOG)]
    if not root.handlers:  # without handlers, Python would no longer write warnings to the terminal
        handlers.append(Terminal())
        handlers[-1].setLevel(NOTICE)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_LOG_FORMAT))
        root.addHandler(handler)
    try:
        yield
    except Exception as error:
        log_to_file(f"failed:\n{format_trace(error)}")
        raise
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
