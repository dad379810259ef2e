"""A sweep: all jobs are checked before anything is written or started, and one that was begun goes on."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write

from foundry.config.errors import ConfigError, Violation
from foundry.config.root import Config, to_config
from foundry.config.setting import check_fields
from foundry.config.sweep import Sweep
from foundry.launch.grid import Job, expand
from foundry.launch.jobs import compose_jobs, set_number
from foundry.launch.launchers import FrozenLauncher
from foundry.launch.manifest import Manifest, SweepJob, sweep_job
from foundry.launch.status import queue
from foundry.records.lock import hold
from foundry.records.status import read_status

_log = logging.getLogger(__name__)


class Refused(BaseException):
    """Carries mistakes past Hydra, which would add remarks to an exception of the task."""


@dataclass(frozen=True)
class _Prepared:
    """A job that is known to be right: its place in the sweep, its words, and what they compose to."""

    entry: SweepJob
    words: tuple[str, ...]
    config: Config


class GridSweeper(Sweeper):
    """Runs every combination of what is swept; the options are those of `Sweep`."""

    hydra_context: HydraContext
    config: DictConfig
    launcher: Launcher

    def __init__(
        self,
        max_batch_size: int | None,
        params: Mapping[str, str] | None,
        zip: Sequence[Any],
        exclude: Sequence[str],
    ) -> None:
        self._options = Sweep(
            max_batch_size=max_batch_size,
            params=dict(params or {}),
            zip=[group if isinstance(group, str) else list(group) for group in zip],
            exclude=list(exclude),
        )

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra knows."""
        self.hydra_context, self.config = hydra_context, config
        self._sweep_dir = Path(str(config.hydra.sweep.dir))
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Check every job, then run those that have not finished.

        Args:
            arguments: the command line's words, without Hydra's own.

        Returns:
            For each batch what the launcher says of its jobs.

        Raises:
            ConfigError: with every mistake of every job; nothing has been written.
            SystemExit: 1, a job has failed; there is a line for each.
            Stopped: a signal ended the job that was running.
        """
        composed = self._compose(self._expand(arguments))
        launcher = str(self.config.hydra.runtime.choices["hydra/launcher"])
        manifest = Manifest.begin(self._sweep_dir, sys.argv[1:], launcher)
        jobs = self._numbered(composed, manifest)
        manifest.check(self._sweep_dir, [job.entry for job in jobs], [job.config for job in jobs])
        self._check_launcher(manifest, [config for _, config in composed])
        manifest = manifest.with_jobs([job.entry for job in jobs])
        with _held(self._sweep_dir):
            manifest.save(self._sweep_dir)
            waiting = [job for job in jobs if self._state(job) != "finished"]
            self._write(waiting)
            if finished := len(jobs) - len(waiting):
                _log.info("%d of %d jobs have finished before", finished, len(jobs))
            with _parent_run(self._sweep_dir):
                results = [self._launch(batch) for batch in self._batches(waiting)]
        self._report(jobs)
        return results

    def _expand(self, arguments: Sequence[str]) -> list[Job]:
        if violations := [*check_fields(self._options, "hydra.sweeper"), *self._options.check()]:
            raise ConfigError(violations)
        given = [f"{key}={value}" for key, value in (self._options.params or {}).items()]
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        return expand(parser.parse_overrides([*given, *arguments]), self._options.zip, self._options.exclude)

    def _compose(self, jobs: Sequence[Job]) -> list[tuple[Job, DictConfig]]:
        """Every job with what it composes to.

        Raises:
            ConfigError: with every mistake of every job.
        """
        results = compose_jobs(self.hydra_context.config_loader, self.config, [job.words for job in jobs])
        composed, violations = [], []
        for number, (job, result) in enumerate(zip(jobs, results, strict=True)):
            if isinstance(result, ConfigError):
                name = f"job {number} ({job})" if job.swept else f"job {number}"
                violations += [Violation(name, str(violation)) for violation in result.violations]
            else:
                composed.append((job, result))
        if violations:
            raise ConfigError(violations)
        return composed

    def _numbered(self, composed: Sequence[tuple[Job, DictConfig]], manifest: Manifest) -> list[_Prepared]:
        """The jobs with their numbers and directories, which are written into their configurations too."""
        known = {job.id: job.dir for job in manifest.jobs}
        taken = {folder: id for id, folder in known.items()}
        jobs = []
        for (job, config), index in zip(composed, manifest.number([job for job, _ in composed]), strict=True):
            set_number(config, index)
            folder = known.get(job.id) or _subdir(config)
            if taken.setdefault(folder, job.id) != job.id:
                message = f"gives job {index} ({job}) the directory {folder}, which another has; use ${{hydra.job.num}}"
                raise ConfigError(Violation("hydra.sweep.subdir", message))
            with read_write(config.hydra.sweep):
                config.hydra.sweep.subdir = folder
            own = to_config(config)
            jobs.append(_Prepared(sweep_job(index, folder, job, own), job.words, own))
        return jobs

    def _check_launcher(self, manifest: Manifest, configs: Sequence[DictConfig]) -> None:
        """Refuse what the machine or cluster cannot run, and to go on through a launcher that counts jobs afresh."""
        if isinstance(self.launcher, FrozenLauncher):
            self.launcher.check(configs)
        elif manifest.jobs:
            chosen = self.config.hydra.runtime.choices["hydra/launcher"]
            message = f"is {chosen}, which cannot go on with a sweep; choose sequential, local or slurm"
            raise ConfigError(Violation("hydra/launcher", message))

    def _write(self, jobs: Sequence[_Prepared]) -> None:
        """What a launcher finds: run directories that say which run they are for."""
        from foundry.tracking.mlflow_parent import ParentLink

        OmegaConf.save(self.config, self._sweep_dir / "multirun.yaml")
        for job in jobs:
            run_dir = self._sweep_dir / job.entry.dir
            queue(run_dir, job.config)
            ParentLink.write(run_dir, self._sweep_dir, job.entry.index, " ".join(job.entry.overrides))

    def _batches(self, jobs: Sequence[_Prepared]) -> Iterator[Sequence[_Prepared]]:
        size = self._options.max_batch_size or max(len(jobs), 1)
        for start in range(0, len(jobs), size):
            yield jobs[start : start + size]

    def _launch(self, jobs: Sequence[_Prepared]) -> Sequence[JobReturn]:
        return self.launcher.launch([job.words for job in jobs], initial_job_idx=jobs[0].entry.index)

    def _state(self, job: _Prepared) -> str | None:
        return read_status(self._sweep_dir / job.entry.dir).get("state")

    def _report(self, jobs: Sequence[_Prepared]) -> None:
        """The table of the sweep, a line for each job that has failed, and exit code 1 if one has, or was stopped."""
        from rich.console import Console

        from foundry.report import report

        report(self._sweep_dir, Console(), picture=False)
        failed = [job for job in jobs if self._state(job) in ("failed", "lost", "stopped")]
        for job in failed:
            run_dir = self._sweep_dir / job.entry.dir
            sys.stderr.write(f"{job.entry}: {read_status(run_dir)['reason']}; see {run_dir / 'foundry.log'}\n")
        if failed:
            raise SystemExit(1)


def _subdir(config: DictConfig) -> str:
    """The job's directory, relative to the sweep's."""
    state = HydraConfig.instance()
    before = state.cfg
    state.cfg = cast(Any, config)  # for ${hydra:...}; set_config would copy the configuration
    try:
        return str(config.hydra.sweep.subdir)
    finally:
        state.cfg = before


@contextmanager
def _held(sweep_dir: Path) -> Iterator[None]:
    """Keep other processes from running the same sweep at the same time.

    Raises:
        ConfigError: one is.
    """
    with ExitStack() as held:
        if not hold(sweep_dir, held):
            message = f"is {sweep_dir}, where another process runs a sweep; wait for it, or choose another"
            raise ConfigError(Violation("hydra.sweep.dir", message))
        yield


@contextmanager
def _parent_run(sweep_dir: Path) -> Iterator[None]:
    """End the sweep's run in MLflow, if it has one, however the sweep ends."""
    stopped = True
    try:
        yield
        stopped = False
    finally:
        from foundry.tracking.destination import short_waits
        from foundry.tracking.mlflow_parent import close_parent

        try:
            with short_waits():
                close_parent(sweep_dir, stopped=stopped)
        except Exception as error:
            _log.warning("the sweep's run in MLflow stays open: %s: %s", type(error).__name__, error)
