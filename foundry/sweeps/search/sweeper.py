"""Sweeper of `hydra/sweeper=optuna`: Optuna proposes each job from the results of the earlier ones."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from foundry.config.packages import missing_message
from foundry.config.schemas.sweeper import Search
from foundry.core.errors import ConfigError, Violation
from foundry.core.exit_codes import ExitCode
from foundry.launch.launchers import FrozenLauncher
from foundry.run_dir.redact import masked_text
from foundry.sweeps.compose_jobs import compose_jobs
from foundry.sweeps.job import Job
from foundry.sweeps.manifest import SweepManifest
from foundry.sweeps.sweeper import CheckedSweeper, without_nodes

if TYPE_CHECKING:
    from foundry.launch.job_queue import JobQueue
    from foundry.sweeps.search.blocking_queue import BlockingQueue
    from foundry.sweeps.search.place import StudyPlace
    from foundry.sweeps.search.proposals import Proposer
    from foundry.sweeps.search.search_space import Space
OVERRIDES = "overrides"
"""Key of the overrides that all jobs share in the facts of a shared study."""


class OptunaSweeper(CheckedSweeper):
    """Sweeper that runs the jobs that Optuna proposes, with the options in `Search`."""

    def __init__(self, **settings: Any) -> None:
        self.options = self._search = Search(**without_nodes(settings))

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the requirements of a search, then set up the launcher as in the base class.

        Raises:
            ConfigError: if Optuna is not installed, or the launcher would not wait for the jobs.
        """
        try:
            import optuna
        except ImportError:
            message = missing_message("optuna", "search")
            raise ConfigError(Violation("hydra/sweeper", message)) from None
        if OmegaConf.select(config, "hydra.launcher.detach"):
            message = "is true but a search must wait for results before it proposes more jobs; set it to false"
            raise ConfigError(Violation("hydra.launcher.detach", message))
        if folder := OmegaConf.select(config, "hydra.launcher.write"):
            message = f"is {folder} but a search must wait for results before it proposes more jobs; leave it out"
            raise ConfigError(Violation("hydra.launcher.write", message))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def run(self, overrides: Sequence[Override]) -> list[Sequence[JobReturn]]:
        """Check the extreme values of each key, then propose and run jobs until none is left."""
        from foundry.sweeps.search.loop import SearchLoop
        from foundry.sweeps.search.place import StudyPlace
        from foundry.sweeps.search.search_space import Space

        search, space = self._search, Space.parse(overrides)
        proposer, place = self._proposer(space), StudyPlace(search, self.sweep_dir)
        manifest = self.begin()
        self._check(space, proposer, place, manifest)
        with self.hold_lock(), place.open(self._facts(space)) as study:
            loop = SearchLoop(self, search, study, space, proposer, manifest)
            with self._queue() as queue:
                loop.run(queue)
        self.report(list(loop.jobs.values()))
        if loop.failures:
            raise SystemExit(ExitCode.FAILED)
        return []

    def _queue(self) -> "JobQueue | BlockingQueue":
        from foundry.launch.job_queue import JobQueue
        from foundry.sweeps.search.blocking_queue import BlockingQueue

        if isinstance(self.launcher, FrozenLauncher):
            return JobQueue(self.launcher, limit=self._search.n_jobs)
        return BlockingQueue(self.launcher, limit=self._search.n_jobs)

    def _proposer(self, space: "Space") -> "Proposer":
        from foundry.sweeps.search.proposals import Proposer

        return Proposer(self._search.sampler, self._search.direction.value, space.distributions)

    def _check(self, space: "Space", proposer: "Proposer", place: "StudyPlace", manifest: SweepManifest) -> None:
        """Check a search before anything is written.

        Raises:
            ConfigError: if an extreme value or a choice is invalid, or the directory holds another search or sweep.
        """
        from foundry.sweeps.search.proposals import View, build

        points = list[Mapping[str, Any]]()
        if (study := place.find()) is not None:
            place.check(study, self._facts(space))
            points = [trial.params for trial in study.trials() if space.contains(trial.params)]
        elif manifest.jobs and place.is_new:
            message = f"is {self.sweep_dir}, which contains a sweep that is not a search; choose another"
            raise ConfigError(Violation("hydra.sweep.dir", message))
        first = proposer.propose(0, [], View.empty()).params
        if self._search.pruner is not None and self._search.asha is None:
            build("pruner", self._search.pruner)
        self._check_corners(space, first)
        jobs_by_id = {job.id: job for job in map(space.job, [first, *points])}
        self.prepare(list(jobs_by_id.values()), manifest)

    def _check_corners(self, space: "Space", values: Mapping[str, Any]) -> None:
        """Compose the job at a point, and the jobs that differ from it in one key, set to each extreme of that key.

        Raises:
            ConfigError: with all errors, each once.
        """
        corners = list(space.corners(values))
        results = compose_jobs(self.hydra_context.config_loader, self.config, [job.overrides for job in corners])
        affected_jobs = dict[Violation, list[Job]]()
        for job, result in zip(corners, results, strict=True):
            for violation in dict.fromkeys(result.violations) if isinstance(result, ConfigError) else ():
                affected_jobs.setdefault(violation, []).append(job)
        if affected_jobs:
            raise ConfigError(
                violation
                if len(jobs) == len(corners)
                else Violation(f"with {', '.join(_differing_overrides(jobs[0], corners[0]))}", str(violation))
                for violation, jobs in affected_jobs.items()
            )

    def _facts(self, space: "Space") -> dict[str, str]:
        """Return the properties that must not change when a search is resumed."""
        facts = {dimension.key: str(dimension.distribution) for dimension in space.dimensions}
        facts |= {"metric": self._search.metric or "", "direction": self._search.direction.value}
        if (asha := self._search.asha) is not None:
            facts["rungs"] = f"from {asha.min_resource} by {asha.reduction_factor}, at most {asha.max_rungs}"
        if self._search.storage is not None:  # in a sweep directory, the jobs themselves are compared
            facts[OVERRIDES] = masked_text(" ".join(sorted(space.fixed)))
        return facts


def _differing_overrides(job: Job, first: Job) -> Sequence[str]:
    """Return the swept overrides of a job that `first` does not have; all its swept overrides if it equals `first`."""
    return [override for override in job.swept if override not in first.swept] or job.swept
