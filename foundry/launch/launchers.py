"""What foundry's launchers share: run directories made ready, and what became of the jobs in them.

Hydra's own launchers compose a job where it runs, from the YAML files as they are by then. Foundry's write down what
was composed and checked, and the process that runs it reads only that.
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

from foundry.config.composition.hydra_internals import current_config
from foundry.config.record.frozen import hash_config, save_config, save_yaml
from foundry.config.schemas.root import Config, to_config
from foundry.run_dir.files import make_folder
from foundry.run_dir.lock import is_held
from foundry.run_dir.names import HYDRA, LOG, STATUS
from foundry.run_dir.redact import printable
from foundry.run_dir.result import read_result
from foundry.run_dir.status import read_status, write_status


class JobFailed(Exception):
    """A job did not finish; the message has its name, its state and the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComposedJob:
    """A job that a launcher starts.

    Attributes:
        index: its number in the sweep.
        overrides: all of its overrides.
        label: those that tell it from the others.
        run_dir: where it runs; absolute.
        config: the whole configuration, Hydra's part included.
    """

    index: int
    overrides: tuple[str, ...]
    label: str
    run_dir: Path
    config: DictConfig

    def __str__(self) -> str:
        return f"job {self.index} ({self.label})" if self.label else f"job {self.index}"


class FrozenLauncher(Launcher):
    """Runs jobs as they were composed when they were checked.

    Attributes:
        work: what the process of a job does: runs what a run directory holds, and returns its exit code.
        detached: whether jobs were left to run by themselves; what is known of them is in their run directories.
    """

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        """Make a launcher; of the settings each job has its own, which may differ, in its configuration."""
        self.work = work
        self.detached = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep Hydra's loader and the configuration of the sweep."""
        self._context = hydra_context
        self._master = config

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Refuse jobs that the machine or the cluster cannot run; called before anything of a sweep is written.

        Raises:
            ConfigError: with the reason.
        """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose and run the jobs of a sweeper that is not foundry's; otherwise as `start`."""
        common = set.intersection(*map(set, job_overrides))
        jobs = []
        for index, overrides in enumerate(map(tuple, job_overrides), initial_job_idx):
            config = self._context.config_loader.load_sweep_config(self._master, list(overrides))
            set_number(config, index)
            with current_config(config):
                run_dir = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
            label = " ".join(override for override in overrides if override not in common)
            jobs.append(ComposedJob(index=index, overrides=overrides, label=label, run_dir=run_dir, config=config))
        return self.start(jobs)

    def start(self, jobs: Sequence[ComposedJob]) -> list[JobReturn]:
        """Run the jobs and return what came of each, in order; a job that failed does not end the others.

        Raises:
            ConfigError: the machine or the cluster cannot run such jobs.
            KeyboardInterrupt: Ctrl-C ended the wait.
            SystemExit: another signal did; its code is 128 + its number.
        """
        setup_globals()
        for job in jobs:
            self.prepare(job)
        self.run(jobs)
        return [_job_return(job, detached=self.detached) for job in jobs]

    def prepare(self, job: ComposedJob) -> None:
        """Write into the run directory what a job is, with what Hydra writes there when it runs a job itself."""
        composed = job.config
        with current_config(composed):
            with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
                composed.hydra.runtime.output_dir = str(job.run_dir)
            hydra_dir = job.run_dir / (composed.hydra.output_subdir or HYDRA)
            make_folder(hydra_dir, parents=True)
            own = [str(key) for key in composed if key != "hydra"]
            save_yaml(OmegaConf.masked_copy(composed, own), hydra_dir / "config.yaml")
            save_yaml(OmegaConf.masked_copy(composed, ["hydra"]), hydra_dir / "hydra.yaml")
            save_yaml(composed.hydra.overrides.task, hydra_dir / "overrides.yaml")
            config = to_config(composed)
        save_config(config, job.run_dir)
        queue_job(job.run_dir, config)

    @abstractmethod
    def run(self, jobs: Sequence[ComposedJob]) -> None:
        """Run the jobs; afterwards status.json of each is true."""


class Ledger:
    """Prints each change of a job's state in a line, with how many jobs are in which.

    Args:
        jobs: of the sweep.
        stream: where to print; None: standard output.
    """

    def __init__(self, jobs: Iterable[ComposedJob], *, stream: TextIO | None = None) -> None:
        self._known = {job.index: ("queued", "") for job in jobs}
        self._stream = stream

    def note(self, job: ComposedJob, state: str, reason: str = "") -> None:
        """Record what a job is doing now."""
        if self._known[job.index] == (state, reason):
            return
        self._known[job.index] = (state, reason)
        counts = Counter(state for state, _ in self._known.values())
        summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        say(f"{job}: {state}{f' ({reason})' if reason else ''}; {summary}", self._stream)

    def settled(self, job: ComposedJob) -> None:
        """Record how a job ended, as its status.json has it."""
        status = read_status(job.run_dir)
        state = status.get("state", "lost")
        self.note(job, state, "" if state == "finished" else status.get("reason", ""))


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line to whoever watches the sweep, on standard output or another stream."""
    stream = stream or sys.stdout
    stream.write(f"{printable(line)}\n")
    stream.flush()


def set_number(config: DictConfig, number: int) -> None:
    """Write into a configuration which job of its sweep it is; `hydra.sweep.subdir` follows from it."""
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.job.id = str(number)


def queue_job(run_dir: Path, config: Config) -> None:
    """Make a job's run directory, with the configuration that will run.

    A job that has begun keeps its files. Nothing is changed if another process trains in the run directory, or if the
    job has finished with this configuration since it was found unfinished: Slurm may still have it in the queue.
    """
    config_hash, status = hash_config(config), read_status(run_dir)
    if is_held(run_dir) or (status.get("state"), status.get("config_hash")) == ("finished", config_hash):
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    is_new = not (run_dir / STATUS).exists()
    # First, as it says whose directory this is.
    write_status(run_dir, state="queued", reason="", config_hash=config_hash)
    if is_new:
        save_config(config, run_dir)


def _job_return(job: ComposedJob, *, detached: bool) -> JobReturn:
    """What Hydra's sweeper gets of a job: the metric, or why there is none."""
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
