"""What foundry's launchers share: run directories made ready, and what became of the jobs in them.

Hydra's own launchers compose a job where it runs, from the YAML files as they are by then. Foundry's write down what
was composed and checked, and the process that runs it, `foundry.launch.worker`, reads only that.
"""

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from foundry.config.frozen import save_config, save_yaml
from foundry.config.schemas.launcher import PLUGINS
from foundry.config.schemas.root import to_config
from foundry.launch.status import queue
from foundry.run_dir.files import make_folder
from foundry.run_dir.redact import printable
from foundry.run_dir.status import read_status
from foundry.run_dir.strict_json import read_object
from foundry.sweeps.jobs import configs_to_launch
from foundry.sweeps.manifest import Manifest

HYDRA_DIR = ".hydra"
ENDED = ("finished", "failed", "stopped", "lost")
"""States of a job that will not change by themselves."""


class JobFailed(Exception):
    """A job did not finish; says which one, its state and why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A job that is ready to run.

    Attributes:
        number: its place in the sweep.
        words: all of its overrides.
        label: those that tell it from the others.
        run_dir: holds config.yaml, what the job is to run; absolute.
        composed: the whole configuration, Hydra's part included.
    """

    number: int
    words: tuple[str, ...]
    label: str
    run_dir: Path
    composed: DictConfig

    def __str__(self) -> str:
        return f"job {self.number} ({self.label})" if self.label else f"job {self.number}"


class FrozenLauncher(Launcher):
    """Runs jobs as they were composed when they were checked.

    Attributes:
        detached: whether jobs were left to go on by themselves; what is known of them is in their run directories.
    """

    def __init__(self, **settings: Any) -> None:
        """Take the settings that Hydra passes; each job's own, which may differ, are in its configuration."""
        self.detached = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra knows; the task function is replaced by the worker."""
        self._context, self._master = hydra_context, config

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Refuse jobs that the machine or the cluster cannot run; called before anything of a sweep is written.

        Raises:
            ConfigError: what is wrong.
        """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return what came of each, in order; a job that failed does not end the others.

        Raises:
            ConfigError: the machine or the cluster cannot run such jobs.
            KeyboardInterrupt: Ctrl-C ended the wait.
            SystemExit: another signal did; its code is 128 + its number.
        """
        setup_globals()
        loader = self._context.config_loader
        configs = configs_to_launch(loader, self._master, job_overrides, initial_job_idx)
        labels = self._labels(configs, job_overrides)
        jobs = [
            self.prepare(config, tuple(words), label)
            for config, words, label in zip(configs, job_overrides, labels, strict=True)
        ]
        self.run(jobs)
        return [_returned(job, detached=self.detached) for job in jobs]

    def _labels(self, configs: Sequence[DictConfig], job_overrides: Sequence[Sequence[str]]) -> list[str]:
        """What tells each job from the others of the sweep; where nobody has written that down, of this batch."""
        manifest = Manifest.load(Path(str(self._master.hydra.sweep.dir)))
        known = {job.index: " ".join(job.overrides) for job in manifest.jobs} if manifest else {}
        common = set.intersection(*(set(words) for words in job_overrides))
        return [
            known.get(config.hydra.job.num, " ".join(word for word in words if word not in common))
            for config, words in zip(configs, job_overrides, strict=True)
        ]

    def prepare(self, composed: DictConfig, words: tuple[str, ...], label: str) -> Job:
        """Write into the run directory what a job is, with what Hydra writes there when it runs a job itself."""
        before = HydraConfig.instance().cfg
        HydraConfig.instance().cfg = cast(Any, composed)  # set_config would copy the configuration
        try:
            run_dir = Path(str(composed.hydra.sweep.dir), str(composed.hydra.sweep.subdir)).absolute()
            with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
                composed.hydra.runtime.output_dir = str(run_dir)
            hydra_dir = run_dir / (composed.hydra.output_subdir or HYDRA_DIR)
            make_folder(hydra_dir)
            own = [str(key) for key in composed if key != "hydra"]
            save_yaml(OmegaConf.masked_copy(composed, own), hydra_dir / "config.yaml")
            save_yaml(OmegaConf.masked_copy(composed, ["hydra"]), hydra_dir / "hydra.yaml")
            save_yaml(composed.hydra.overrides.task, hydra_dir / "overrides.yaml")
            config = to_config(composed)
        finally:
            HydraConfig.instance().cfg = before
        save_config(config, run_dir)
        queue(run_dir, config)
        return Job(number=int(composed.hydra.job.num), words=words, label=label, run_dir=run_dir, composed=composed)

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs; afterwards status.json of each is true."""


class Ledger:
    """Says each change of a job's state in a line, with how many jobs are in which."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._said = {job.number: ("queued", "") for job in jobs}

    def note(self, job: Job, state: str, why: str = "") -> None:
        """Take what a job is doing now; `why` may say more."""
        if self._said[job.number] == (state, why):
            return
        self._said[job.number] = (state, why)
        counts = Counter(state for state, _ in self._said.values())
        summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        say(f"{job}: {state}{f' ({why})' if why else ''}; {summary}")

    def settled(self, job: Job) -> None:
        """Take from status.json how a job ended."""
        status = read_status(job.run_dir)
        state = status.get("state", "lost")
        self.note(job, state, "" if state == "finished" else status.get("reason", ""))


def say(line: str) -> None:
    """Write a line to the terminal at once, whoever reads it."""
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


def register() -> None:
    """Make foundry's sweepers and launchers known to Hydra, which looks into its plugins' package only.

    `Plugins.register` would use the name of the class's own module, which Hydra then refuses to instantiate.
    """
    from foundry.launch.local_launcher import LocalLauncher
    from foundry.launch.sequential import SequentialLauncher
    from foundry.launch.slurm_launcher import SlurmLauncher
    from foundry.sweeps.search import OptunaSweeper
    from foundry.sweeps.sweeper import GridSweeper

    for plugin in (GridSweeper, OptunaSweeper, SequentialLauncher, LocalLauncher, SlurmLauncher):
        Plugins.instance().class_name_to_class[f"{PLUGINS}.{plugin.__name__}"] = plugin


def _returned(job: Job, *, detached: bool) -> JobReturn:
    """What Hydra's sweeper is told of a job: the metric, or why there is none."""
    status = read_status(job.run_dir)
    returned = JobReturn(overrides=list(job.words), working_dir=str(job.run_dir), task_name=job.composed.hydra.job.name)
    state = status.get("state", "lost")
    if state == "finished":
        result = read_object(job.run_dir / "result.json")
        returned.return_value, returned.status = result.get("metric"), JobStatus.COMPLETED
    elif detached:
        returned.return_value, returned.status = None, JobStatus.COMPLETED
    else:
        why = f"{job} is {state}: {status.get('reason', '')}; see {job.run_dir / 'foundry.log'}"
        returned.return_value, returned.status = JobFailed(why), JobStatus.FAILED
    return returned
