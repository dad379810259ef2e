"""Base class of foundry's launchers: prepares run directories and collects the results of jobs.

Hydra's own launchers compose a job where it runs, from the YAML files as they are at that time. Foundry's launchers
save the configuration that was composed and checked, and a job uses only that configuration.
"""

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from foundry.config.composition.hydra_application import current_config
from foundry.config.record.frozen import hash_config, save_config, save_yaml
from foundry.config.schemas.root import Config, to_config
from foundry.run_dir.files import make_folder
from foundry.run_dir.lock import is_held
from foundry.run_dir.names import HYDRA, LOG, STATUS
from foundry.run_dir.redact import printable
from foundry.run_dir.result import read_result
from foundry.run_dir.status import read_status, write_status


class JobFailed(Exception):
    """A job did not finish; the message contains its name, its state and the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComposedJob:
    """A job to start, with its composed configuration.

    Attributes:
        index: number of the job in the sweep.
        overrides: all overrides of the job.
        label: overrides that differ between the jobs.
        run_dir: absolute path of the run directory.
        config: the whole configuration, including Hydra's.
    """

    index: int
    overrides: tuple[str, ...]
    label: str
    run_dir: Path
    config: DictConfig

    def __str__(self) -> str:
        return f"job {self.index} ({self.label})" if self.label else f"job {self.index}"


class FrozenLauncher(Launcher):
    """Launcher that runs jobs with the configurations that were checked.

    Attributes:
        work: entry point of a job's process: executes the run of a run directory, and returns the exit code.
        detached: whether the launcher left jobs running; their results are in their run directories only.
    """

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        """Create a launcher; `settings` are ignored, because each job's configuration contains its own."""
        self.work = work
        self.detached = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's context and the configuration of the sweep."""
        self._context = hydra_context
        self._master = config

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Check that the machine or the cluster can run the jobs; called before any file of a sweep is written.

        Raises:
            ConfigError: the machine or the cluster cannot run a job; the message has the reason.
        """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose the jobs of a sweeper that is not foundry's, and run them as `start` does."""
        shared_overrides = set.intersection(*map(set, job_overrides))
        jobs = []
        for index, overrides in enumerate(map(tuple, job_overrides), initial_job_idx):
            config = self._context.config_loader.load_sweep_config(self._master, list(overrides))
            set_number(config, index)
            with current_config(config):
                run_dir = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
            label = " ".join(override for override in overrides if override not in shared_overrides)
            jobs.append(ComposedJob(index=index, overrides=overrides, label=label, run_dir=run_dir, config=config))
        return self.start(jobs)

    def start(self, jobs: Sequence[ComposedJob]) -> list[JobReturn]:
        """Run the jobs and return their results in order; a failed job does not end the others.

        Raises:
            ConfigError: the machine or the cluster cannot run these jobs.
            KeyboardInterrupt: Ctrl-C ended the wait.
            SystemExit: another signal ended the wait; the code is 128 + its number.
        """
        setup_globals()
        for job in jobs:
            self.prepare(job)
        self.run(jobs)
        return [_job_return(job, detached=self.detached) for job in jobs]

    def prepare(self, job: ComposedJob) -> None:
        """Write a job's configuration to its run directory, and the files that Hydra writes if it runs a job itself."""
        composed = job.config
        with current_config(composed):
            with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
                composed.hydra.runtime.output_dir = str(job.run_dir)
            hydra_dir = job.run_dir / (composed.hydra.output_subdir or HYDRA)
            make_folder(hydra_dir, parents=True)
            foundry_keys = [str(key) for key in composed if key != "hydra"]
            save_yaml(OmegaConf.masked_copy(composed, foundry_keys), hydra_dir / "config.yaml")
            save_yaml(OmegaConf.masked_copy(composed, ["hydra"]), hydra_dir / "hydra.yaml")
            save_yaml(composed.hydra.overrides.task, hydra_dir / "overrides.yaml")
            config = to_config(composed)
        save_config(config, job.run_dir)
        queue_job(job.run_dir, config)

    @abstractmethod
    def run(self, jobs: Sequence[ComposedJob]) -> None:
        """Run the jobs; on return, the status.json of each job is up to date."""


class Ledger:
    """Prints one line for each change of a job's state, with the number of jobs in each state.

    Args:
        jobs: jobs of the sweep.
        stream: output stream; None for standard output.
    """

    def __init__(self, jobs: Iterable[ComposedJob], *, stream: TextIO | None = None) -> None:
        self._states = {job.index: ("queued", "") for job in jobs}
        self._stream = stream

    def note(self, job: ComposedJob, state: str, reason: str = "") -> None:
        """Record the current state of a job, and print it if it has changed."""
        if self._states[job.index] == (state, reason):
            return
        self._states[job.index] = (state, reason)
        counts = Counter(state for state, _ in self._states.values())
        summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        say(f"{job}: {state}{f' ({reason})' if reason else ''}; {summary}", self._stream)

    def note_end(self, job: ComposedJob) -> None:
        """Record and print how a job ended, according to its status.json."""
        status = read_status(job.run_dir)
        state = status.get("state", "lost")
        self.note(job, state, "" if state == "finished" else status.get("reason", ""))


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line for the user who watches the sweep, to standard output or another stream."""
    stream = stream or sys.stdout
    stream.write(f"{printable(line)}\n")
    stream.flush()


def set_number(config: DictConfig, number: int) -> None:
    """Set the number of a job in its configuration; `hydra.sweep.subdir` is derived from it."""
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.job.id = str(number)


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


def _job_return(job: ComposedJob, *, detached: bool) -> JobReturn:
    """Return the result of a job for Hydra's sweeper: the metric, the reason of a failure, or None if left running."""
    status = read_status(job.run_dir)
    returned = JobReturn(
        overrides=list(job.overrides), working_dir=str(job.run_dir), task_name=job.config.hydra.job.name
    )
    state = status.get("state", "lost")
    if state == "finished":
        returned.return_value = read_result(job.run_dir).get("metric")
        returned.status = JobStatus.COMPLETED
    elif detached:
        returned.return_value = None
        returned.status = JobStatus.COMPLETED
    else:
        reason = f"{job} is {state}: {status.get('reason', '')}; see {job.run_dir / LOG}"
        returned.return_value = JobFailed(reason)
        returned.status = JobStatus.FAILED
    return returned
