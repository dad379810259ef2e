"""Base class of foundry's launchers: prepares run directories and collects the results of jobs.

Hydra's own launchers compose a job where it runs, from the YAML files as they are at that time. Foundry's launchers
save the configuration that was composed and checked, and a job uses only that configuration.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from foundry.config.composition.hydra_application import current_config
from foundry.config.record.frozen import hash_config, save_config, save_yaml
from foundry.config.schemas.root import Config, to_config
from foundry.launch.composed_job import ComposedJob, set_number
from foundry.launch.job_queue import JobQueue
from foundry.launch.job_state import JobState
from foundry.run_dir.files import make_folder
from foundry.run_dir.lock import is_held
from foundry.run_dir.names import HYDRA, STATUS
from foundry.run_dir.status import read_status, write_status


class FrozenLauncher(Launcher):
    """Launcher that runs jobs with the configurations that were checked.

    A launcher has four methods: `submit`, `poll`, `cancel` and `logs`. `JobQueue` calls them; it does everything that
    launchers have in common.

    Attributes:
        work: entry point of a job's process: executes the run of a run directory, and returns the exit code.
        master: configuration of the sweep.
        detached: whether the launcher left jobs running; their results are in their run directories only.
        title: name of the scheduler for messages.
        survives: whether jobs continue without this process, so that Ctrl-C asks whether to cancel them.
        in_process: whether `submit` runs a job to its end in this process, which then handles signals itself.
        has_queue: whether a submitted job may wait in a queue of the scheduler, even if `places` returns a number.
        skips_locked: whether a job is skipped if another process trains in its run directory; otherwise the job itself
            waits for that process to save and exit.
        poll_seconds: first and last interval between polls.
    """

    title: ClassVar[str] = "the launcher"
    survives: ClassVar[bool] = False
    in_process: ClassVar[bool] = False
    has_queue: ClassVar[bool] = False
    skips_locked: ClassVar[bool] = False
    poll_seconds: ClassVar[tuple[float, float]] = (1.0, 15.0)

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        """Create a launcher; `settings` are ignored, because each job's configuration contains its own."""
        self.work = work
        self.detached = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's context and the configuration of the sweep."""
        self._context = hydra_context
        self.master = config

    @property
    def sweep_dir(self) -> str:
        """The sweep directory, as the user wrote it."""
        return str(self.master.hydra.sweep.dir)

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Check that the machine or the cluster can run the jobs; called before any file of a sweep is written.

        Raises:
            ConfigError: the machine or the cluster cannot run a job; the message has the reason.
        """

    @abstractmethod
    def submit(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Start jobs whose run directories are prepared; return the launcher's id of each by job index.

        Raises:
            ConfigError: the jobs are refused.
            Unreachable: no job was started, or `attach` finds the jobs that were, or the next call does not start them
                again; the queue calls again later.
        """

    @abstractmethod
    def poll(self, ids: Collection[str]) -> dict[str, JobState]:
        """Return the states of jobs by id; unknown jobs are omitted.

        Raises:
            Unreachable: the states cannot be determined now; the queue calls again later.
        """

    @abstractmethod
    def cancel(self, ids: Collection[str], *, kill: bool = False) -> None:
        """Ask jobs to save and stop, or kill them.

        Raises:
            Unreachable: the queue calls again later.
        """

    @abstractmethod
    def logs(self, job_id: str) -> str:
        """Return the last line of output of a job that recorded no reason for its end; empty without output."""

    def places(self, configs: Sequence[DictConfig], limit: int) -> int | None:
        """Prepare to run jobs, and return the number of jobs that can run at a time; called before the first job.

        Args:
            configs: configurations of the first jobs.
            limit: maximum number of jobs at a time that the sweep asks for.

        Returns:
            The number of places; None for a scheduler with a queue, which gets every job at once.
        """
        return None

    def attach(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Return, by job index, the ids of jobs that an earlier command submitted and that have not ended."""
        return {}

    def wait(self, seconds: float) -> None:
        """Wait for a time, or until a job may have ended."""
        time.sleep(seconds)

    def format_ids(self, ids: Iterable[str]) -> str:
        """Return ids of jobs as text."""
        return ", ".join(ids)

    def cancel_command(self, ids: Iterable[str]) -> str:
        """Return a shell command that cancels jobs; empty by default."""
        return ""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose the jobs of a sweeper that is not foundry's, and run them as `start` does."""
        shared_overrides = set.intersection(*map(set, job_overrides))
        jobs = []
        for index, overrides in enumerate(map(tuple, job_overrides), initial_job_idx):
            config = self._context.config_loader.load_sweep_config(self.master, list(overrides))
            set_number(config, index)
            with current_config(config):
                run_dir = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
            label = " ".join(override for override in overrides if override not in shared_overrides)
            jobs.append(ComposedJob(index=index, overrides=overrides, label=label, run_dir=run_dir, config=config))
        self.check([job.config for job in jobs])
        return self.start(jobs)

    def start(self, jobs: Sequence[ComposedJob]) -> list[JobReturn]:
        """Run the jobs and return their results in order; after a failed job the sweep continues.

        Raises:
            ConfigError: the machine or the cluster cannot run these jobs.
            KeyboardInterrupt: Ctrl-C ended the wait.
            SystemExit: another signal ended the wait; the code is 128 + its number.
        """
        with JobQueue(self, limit=len(jobs)) as queue:
            queue.add(jobs)
            if OmegaConf.select(self.master, "hydra.launcher.detach"):
                queue.detach()
            while queue.next_ended():
                pass
        return [job.result(detached=self.detached) for job in jobs]

    def prepare(self, job: ComposedJob) -> None:
        """Write a job's configuration to its run directory, and the files that Hydra writes if it runs a job itself."""
        composed = job.config
        with current_config(composed):
            with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
                composed.hydra.runtime.output_dir = str(job.run_dir)
            hydra_dir = make_folder(job.run_dir / HYDRA, parents=True)  # the job reads it; not hydra.output_subdir
            foundry_keys = [str(key) for key in composed if key != "hydra"]
            save_yaml(OmegaConf.masked_copy(composed, foundry_keys), hydra_dir / "config.yaml")
            save_yaml(OmegaConf.masked_copy(composed, ["hydra"]), hydra_dir / "hydra.yaml")
            save_yaml(composed.hydra.overrides.task, hydra_dir / "overrides.yaml")
            config = to_config(composed)
        save_config(config, job.run_dir)
        queue_job(job.run_dir, config)


def queue_job(run_dir: Path, config: Config) -> None:
    """Create a job's run directory, record the job as queued, and write its configuration.

    A run directory that has a status keeps its configuration. Nothing changes if another process trains in the run
    directory, or if the job has finished with this configuration since the check for unfinished jobs, for example as a
    job still queued in Slurm.
    """
    config_hash, status = hash_config(config), read_status(run_dir)
    if is_held(run_dir) or (status.get("state"), status.get("config_hash")) == ("finished", config_hash):
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    is_new = not (run_dir / STATUS).exists()
    # Write the status first: it identifies the directory as a run directory.
    write_status(run_dir, state="queued", reason="", config_hash=config_hash)
    if is_new:
        save_config(config, run_dir)
