"""Sweepers: they check all jobs before they write or start anything, and resume interrupted sweeps."""

import logging
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write

from foundry.config.composition.hydra_application import current_config
from foundry.config.record.frozen import hash_config, save_yaml
from foundry.config.schemas.root import Config, to_config
from foundry.config.schemas.sweeper import Sweep
from foundry.config.schemas.sweeper import Sweeper as Options
from foundry.config.schemas.tracking import JSON
from foundry.config.setting import check_fields
from foundry.core.errors import ConfigError, Violation
from foundry.core.exit_codes import ExitCode
from foundry.launch.claim import check_free, claim
from foundry.launch.composed_job import ComposedJob, set_number
from foundry.launch.launchers import FrozenLauncher, queue_job
from foundry.run_dir.lock import lock
from foundry.run_dir.names import LOG, MULTIRUN
from foundry.run_dir.status import FAILED, read_status
from foundry.sweeps.compose_jobs import compose_jobs
from foundry.sweeps.grid import expand
from foundry.sweeps.job import Job
from foundry.sweeps.manifest import SweepManifest
from foundry.sweeps.plugins import build_launcher
from foundry.sweeps.refusals import refusals

_log = logging.getLogger(__name__)
_KEY = "hydra.sweep.dir"


class CheckedSweeper(Sweeper):
    """Base class of foundry's sweepers, which checks, records, runs and reports jobs.

    Attributes:
        hydra_context: Hydra's loaders of options.
        config: the configuration of the sweep, including the `hydra` node.
        launcher: the launcher that runs the jobs.
        options: the sweeper's own options.
        sweep_dir: the directory that contains the run directories of the jobs.
    """

    hydra_context: HydraContext
    config: DictConfig
    launcher: Launcher
    options: Options
    sweep_dir: Path
    _composed: dict[int, DictConfig]
    """Composed configurations of the jobs that were checked but not yet launched, by index."""
    _is_described: bool
    """Whether multirun.yaml has been written."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's loader and the configuration of the sweep, and instantiate the launcher."""
        self.hydra_context = hydra_context
        self.config = config
        self.sweep_dir = Path(str(config.hydra.sweep.dir))
        self._composed = {}
        self._is_described = False
        self.launcher = build_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Check all jobs, then run the unfinished ones.

        Args:
            arguments: overrides from the command line, without those for Hydra.

        Returns:
            For each batch, the launcher's results.

        Raises:
            ConfigError: with all config errors, before anything is written.
            SystemExit: 1 if a job has failed, 3 if none has but one was stopped; each is printed on a line.
            Stopped: if a signal ended the running job.
        """
        if violations := list(check_fields(self.options, "hydra.sweeper")) or list(self.options.check()):
            raise ConfigError(violations)
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        param_overrides, violations = list[Override](), list[Violation]()
        for key, value in self.options.params.items():
            try:
                param_overrides += parser.parse_overrides([f"{key}={value}"])
            except HydraException:
                message = f"is {value!r}, which is not a valid override value, such as '1,2', 'range(3)' or \"'a b'\""
                violations.append(Violation(f"hydra.sweeper.params.{key}", message))
        if violations:
            raise ConfigError(violations)
        return self.run([*param_overrides, *parser.parse_overrides(arguments)])

    @abstractmethod
    def run(self, overrides: Sequence[Override]) -> list[Sequence[JobReturn]]:
        """Check and run the jobs that result from these overrides."""

    def begin(self) -> SweepManifest:
        """Return the manifest of the sweep, including the jobs of an earlier start, without writing it."""
        launcher = str(self.config.hydra.runtime.choices["hydra/launcher"])
        metric, direction = self.options.metric or "", self.options.direction.value
        return SweepManifest.begin(self.sweep_dir, sys.argv[1:], launcher=launcher, metric=metric, direction=direction)

    def prepare(self, jobs: Sequence[Job], manifest: SweepManifest) -> list[Job]:
        """Compose and check jobs, and return them with index, directory and configuration hash.

        Raises:
            ConfigError: with all config errors of all jobs; also if the directory holds another sweep, or the machine
                or cluster cannot run the jobs.
        """
        composed = self._compose(jobs)
        numbered_jobs, configs = self._number(jobs, composed, manifest)
        self._check_folders(numbered_jobs)
        manifest.check(self.sweep_dir, numbered_jobs, configs)
        self._check_launcher(manifest, composed)
        self._composed |= {job.index: config for job, config in zip(numbered_jobs, composed, strict=True)}
        return numbered_jobs

    def record(self, manifest: SweepManifest, jobs: Sequence[Job]) -> SweepManifest:
        """Add jobs to the manifest, write it, create the directories of unfinished jobs; return the new manifest."""
        from foundry.tracking.mlflow.parent_link import ParentLink

        manifest = manifest.with_jobs(jobs)
        manifest.save(self.sweep_dir)
        if not self._is_described:  # a search records each job while a place waits for it
            save_yaml(self.config, self.sweep_dir / MULTIRUN)
        self._is_described = True
        for job in jobs:
            if self.state(job) != "finished":
                run_dir = self.run_dir(job)
                queue_job(run_dir, to_config(self._composed[job.index]))
                ParentLink.write(run_dir, self.sweep_dir, job.index, job.swept)
        return manifest

    def launch(self, jobs: Sequence[Job]) -> Sequence[JobReturn]:
        """Run jobs and return their results."""
        if not isinstance(self.launcher, FrozenLauncher):
            return self.launcher.launch([job.overrides for job in jobs], initial_job_idx=jobs[0].index)
        return self.launcher.start([self.composed(job) for job in jobs])

    def composed(self, job: Job) -> ComposedJob:
        """Return a prepared job with its composed configuration; only once for each call of `prepare`."""
        return ComposedJob(
            index=job.index,
            overrides=job.overrides,
            label=" ".join(job.swept),
            run_dir=self.run_dir(job).absolute(),
            config=self._composed.pop(job.index),
        )

    def run_dir(self, job: Job) -> Path:
        """Return the run directory of a job."""
        return self.sweep_dir / job.dir

    def state(self, job: Job) -> str | None:
        """Return the state of a job from its status.json; None if the file does not exist."""
        return read_status(self.run_dir(job)).get("state")

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Lock the sweep directory until the `with` block ends.

        On exit, end the sweep's run in MLflow, if it has one, unless detached jobs are still queued or running.

        Raises:
            ConfigError: if another process runs a sweep in the directory.
        """
        from foundry.sweeps.mlflow_parent import try_to_close_parent

        claim(str(self.config.hydra.sweep.dir), _KEY)
        with _lock_sweep(self.sweep_dir):
            stopped = True
            try:
                yield
                stopped = False
            finally:
                has_detached_jobs = isinstance(self.launcher, FrozenLauncher) and self.launcher.detached
                uri = self.config.tracking.uri
                try_to_close_parent(self.sweep_dir, uri=uri, stopped=stopped and not has_detached_jobs)

    def report(self, jobs: Sequence[Job]) -> None:
        """Print the table, write the report files, and print a line for each failed or stopped job.

        Raises:
            SystemExit: 1 if a job has failed or has lost its run directory; 3 if a job was stopped, and none has
                failed: the same command resumes it.
        """
        from rich.console import Console

        from foundry.sweeps.report import report

        report(self.sweep_dir, Console(stderr=self.config.tracking.progress == JSON))
        failed = [job for job in jobs if self.state(job) in FAILED or not self.run_dir(job).is_dir()]
        stopped = [job for job in jobs if self.state(job) == "stopped"]
        for job in sorted([*failed, *stopped], key=lambda job: job.index):
            run_dir = self.run_dir(job)
            reason = (
                read_status(run_dir).get("reason", "") if run_dir.is_dir() else "its run directory no longer exists"
            )
            sys.stderr.write(f"{job}: {reason}; see {run_dir / LOG}\n")
        if failed or stopped:
            raise SystemExit(ExitCode.FAILED if failed else ExitCode.UNFINISHED)

    def _compose(self, jobs: Sequence[Job]) -> list[DictConfig]:
        """Compose the configuration of each job.

        Raises:
            ConfigError: with all config errors of all jobs.
        """
        results = compose_jobs(self.hydra_context.config_loader, self.config, [job.overrides for job in jobs])
        if violations := refusals(jobs, results):
            raise ConfigError(violations)
        return [result for result in results if isinstance(result, DictConfig)]

    def _number(
        self, jobs: Sequence[Job], composed: Sequence[DictConfig], manifest: SweepManifest
    ) -> tuple[list[Job], list[Config]]:
        """Assign numbers and directories to the jobs, and write both into the composed configurations."""
        folders = {job.id: job.dir for job in manifest.jobs}
        owners = {folder: id for id, folder in folders.items()}
        numbered_jobs, configs = list[Job](), list[Config]()
        for job, config, index in zip(jobs, composed, manifest.number(jobs), strict=True):
            set_number(config, index)
            folder = folders.get(job.id) or _subdir(config)
            if owners.setdefault(folder, job.id) != job.id:
                message = (
                    f"gives job {index} ({job.settings}) the directory {folder}, which another job has; "
                    "use ${hydra.job.num}"
                )
                raise ConfigError(Violation("hydra.sweep.subdir", message))
            with read_write(config.hydra.sweep):
                config.hydra.sweep.subdir = folder
            configs.append(to_config(config))
            numbered_jobs.append(replace(job, index=index, dir=folder, config_hash=hash_config(configs[-1])))
        return numbered_jobs, configs

    def _check_folders(self, jobs: Sequence[Job]) -> None:
        """Check that no directory contains unrelated files.

        Raises:
            ConfigError: with each directory that contains files but is no directory of foundry.
        """
        folders = [(str(self.config.hydra.sweep.dir), _KEY)]
        folders += [(str(self.run_dir(job)), "hydra.sweep.subdir") for job in jobs]
        violations = list[Violation]()
        for folder, key in folders:
            try:
                check_free(folder, key)
            except ConfigError as error:
                violations += error.violations
        if violations:
            raise ConfigError(violations)

    def _check_launcher(self, manifest: SweepManifest, configs: Sequence[DictConfig]) -> None:
        """Check that a launcher of foundry can run the jobs here; any other launcher must not resume a sweep."""
        if isinstance(self.launcher, FrozenLauncher):
            self.launcher.check(configs)
        elif manifest.jobs:
            launcher = self.config.hydra.runtime.choices["hydra/launcher"]
            message = f"is {launcher}, which cannot resume a sweep; choose sequential, local or slurm"
            raise ConfigError(Violation("hydra/launcher", message))


class GridSweeper(CheckedSweeper):
    """Sweeper that runs every combination of the swept values, with the options in `Sweep`."""

    def __init__(self, **settings: Any) -> None:
        self.options = self._grid = Sweep(**without_nodes(settings))

    def run(self, overrides: Sequence[Override]) -> list[Sequence[JobReturn]]:
        """Check all jobs, then run the unfinished ones."""
        manifest = self.begin()
        jobs = self.prepare(expand(overrides, self._grid), manifest)
        with self.hold_lock():
            self.record(manifest, jobs)
            waiting = [job for job in jobs if self.state(job) != "finished"]
            if finished := len(jobs) - len(waiting):
                _log.info("%d of %d jobs have already finished", finished, len(jobs))
            size = self._grid.max_batch_size or max(len(waiting), 1)
            results = [self.launch(waiting[start : start + size]) for start in range(0, len(waiting), size)]
        self.report(jobs)
        return results


def without_nodes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that Hydra passes, with lists and dictionaries in place of OmegaConf's nodes."""
    return {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for name, value in settings.items()
    }


def _subdir(config: DictConfig) -> str:
    """Return the job's directory, relative to the sweep directory."""
    with current_config(config):
        return str(config.hydra.sweep.subdir)


@contextmanager
def _lock_sweep(sweep_dir: Path) -> Iterator[None]:
    """Lock a sweep's directory.

    Raises:
        ConfigError: if another process runs a sweep there.
    """
    with ExitStack() as stack:
        if not lock(sweep_dir, stack):
            message = f"is {sweep_dir}, where another process runs a sweep; wait for it, or choose another"
            raise ConfigError(Violation(_KEY, message))
        yield
