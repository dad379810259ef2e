"""Sweeper of `hydra/sweeper=optuna`: Optuna proposes each job from the results of the earlier ones.

The study is stored in the sweep's directory, in a file of JSON lines. If the sampler has a seed, proposal number k
depends only on the seed, on k and on the results so far, so an interrupted search continues as if it had not been.
"""

import hashlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from foundry.config.checks.optuna_parts import build_part
from foundry.config.metrics import check_metric
from foundry.config.packages import missing_message
from foundry.config.schemas.sweeper import Search
from foundry.core.errors import ConfigError, Violation
from foundry.core.exit_codes import ExitCode
from foundry.run_dir.names import STUDY
from foundry.run_dir.result import read_result
from foundry.run_dir.status import FAILED
from foundry.run_dir.trial import TrialLink, open_storage
from foundry.sweeps.compose_jobs import compose_jobs
from foundry.sweeps.job import Job
from foundry.sweeps.manifest import SweepManifest
from foundry.sweeps.sweeper import CheckedSweeper, without_nodes

if TYPE_CHECKING:
    import optuna

    from foundry.sweeps.search_space import Space

_STUDY = "search"
_FACTS = "facts"


class OptunaSweeper(CheckedSweeper):
    """Sweeper that runs the jobs that Optuna proposes, with the options in `Search`."""

    def __init__(self, **settings: Any) -> None:
        self.options = self._search = Search(**without_nodes(settings))
        self._metric = self._search.metric or ""
        self._failures, self._stopped_trials = 0, set[int]()

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
        """Check the extreme values of each key, then propose and run jobs until `_next_trials` returns no more."""
        from foundry.sweeps.search_space import Space

        space = Space.parse(overrides)
        manifest = self.begin()
        self._check(space, manifest)
        jobs, results = dict[int, Job](), list[Sequence[JobReturn]]()
        with self.hold_lock():
            study = self._open(space)
            while numbers := self._next_trials(study, space):
                batch = dict[int, Job]()
                for number in numbers:
                    if (job := self._prepare(study, space, number, manifest)) is not None:
                        batch[number] = job
                        manifest = manifest.with_jobs([job])
                self.record(manifest, list(batch.values()))
                if waiting := self._unfinished_jobs(batch):
                    results.append(self.launch(waiting))
                for number, job in batch.items():
                    self._tell(study, number, job)
                    jobs[job.index] = job
        self.report(list(jobs.values()))
        if self._failures:
            raise SystemExit(ExitCode.FAILED)
        return results

    def _check(self, space: "Space", manifest: SweepManifest) -> None:
        """Check a search before anything is written.

        Raises:
            ConfigError: if an extreme value or a choice is invalid, or the directory holds another search or sweep.
        """
        import optuna

        points = list[dict[str, Any]]()
        if (self.sweep_dir / STUDY).is_file():
            storage = open_storage(self.sweep_dir / STUDY)
            if _STUDY in optuna.get_all_study_names(storage):  # missing if the process was killed before creating it
                study = optuna.load_study(study_name=_STUDY, storage=storage)
                self._check_resumed(study, space)
                points = [trial.params for trial in study.get_trials(deepcopy=False)]
        elif manifest.jobs:
            message = f"is {self.sweep_dir}, which contains a sweep that is not a search; choose another"
            raise ConfigError(Violation("hydra.sweep.dir", message))
        sampler = self._build("sampler", self._sampler_node(0))
        if self._search.pruner is not None:
            self._build("pruner", self._search.pruner)
        first = optuna.create_study(sampler=sampler).ask(space.distributions)
        self._check_corners(space, first.params)
        jobs_by_id = {job.id: job for job in map(space.job, [first.params, *points])}
        self.prepare(list(jobs_by_id.values()), manifest)

    def _check_corners(self, space: "Space", values: dict[str, Any]) -> None:
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

    def _check_resumed(self, study: "optuna.Study", space: "Space") -> None:
        """Check that a resumed search has the same search space, metric and direction as before.

        Raises:
            ConfigError: if one of these has changed.
        """
        new = self._facts(space)
        old = study.user_attrs.get(_FACTS, new)
        changes = [f"{key} {old.get(key, 'not searched')}" for key in {**old, **new} if old.get(key) != new.get(key)]
        if changes:
            message = f"is {self.sweep_dir}, which contains a search with {', '.join(changes)}"
            raise ConfigError(Violation("hydra.sweep.dir", f"{message}; use these settings, or another folder"))

    def _facts(self, space: "Space") -> dict[str, str]:
        """Return the properties that must not change when a search is resumed."""
        distributions = {dimension.key: str(dimension.distribution) for dimension in space.dimensions}
        return {**distributions, "metric": self._metric, "direction": self._search.direction.value}

    def _open(self, space: "Space") -> "optuna.Study":
        """Load the study from the sweep's directory, or create it."""
        import optuna

        study = optuna.create_study(
            study_name=_STUDY,
            storage=open_storage(self.sweep_dir / STUDY),
            direction=self._search.direction.value,
            load_if_exists=True,
        )
        if _FACTS not in study.user_attrs:
            study.set_user_attr(_FACTS, self._facts(space))
        return study

    def _sampler_node(self, number: int) -> Mapping[str, Any]:
        """Return the sampler node for trial `number`; a seed in it depends only on the sampler's seed and `number`."""
        node, seed = self._search.sampler, self._search.sampler.get("seed")
        if seed is None:
            return node
        # Hash seed and number: with their sum, seed + 1 would propose the same points as seed, one trial earlier.
        digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
        return {**node, "seed": int.from_bytes(digest[:4])}

    def _build(self, name: str, node: Mapping[str, Any]) -> Any:
        """Build a sampler or pruner of Optuna.

        Raises:
            ConfigError: if the class does not exist or does not accept the arguments.
        """
        try:
            return build_part(name, node)
        except (TypeError, ValueError) as error:
            text = " ".join(str(error.__cause__ or error).splitlines()[:2])
            raise ConfigError(Violation(f"hydra.sweeper.{name}", f"cannot be built: {text}")) from None

    def _next_trials(self, study: "optuna.Study", space: "Space") -> list[int]:
        """Return the numbers of the trials to run now: interrupted ones, else new ones; empty if the search ends."""
        from optuna.trial import TrialState

        trials = study.get_trials(deepcopy=False)
        running = [trial.number for trial in trials if trial.state is TrialState.RUNNING]
        if interrupted := [number for number in running if number not in self._stopped_trials]:
            return interrupted[: self._search.n_jobs]
        if self._search.max_failures is not None and self._failures >= self._search.max_failures:
            sys.stderr.write(f"the search ends: {self._failures} jobs have failed (hydra.sweeper.max_failures)\n")
            return []
        numbers = range(len(trials), min(len(trials) + self._search.n_jobs, self._search.n_trials))
        return [self._ask(study, space, number) for number in numbers]

    def _ask(self, study: "optuna.Study", space: "Space", number: int) -> int:
        study.sampler = self._build("sampler", self._sampler_node(number))
        return study.ask(space.distributions).number

    def _prepare(self, study: "optuna.Study", space: "Space", number: int, manifest: SweepManifest) -> Job | None:
        """Return the job of a trial; None if the trial's combination of values is invalid, which is a failure."""
        job = space.job(study.get_trials(deepcopy=False)[number].params)
        try:
            (prepared,) = self.prepare([job], manifest)
        except ConfigError as error:
            sys.stderr.write(
                f"{job.settings} is skipped: {'; '.join(violation.message for violation in error.violations)}\n"
            )
            self._fail(study, number)
            return None
        return prepared

    def _unfinished_jobs(self, batch: Mapping[int, Job]) -> list[Job]:
        """Return the unfinished jobs of a batch, without duplicates; with a pruner, write a `TrialLink` for each."""
        waiting = dict[int, Job]()
        for number, job in batch.items():
            if self.state(job) == "finished" or job.index in waiting:
                continue
            waiting[job.index] = job
            if self._search.pruner is not None:
                run_dir = self.run_dir(job)
                TrialLink(
                    journal=os.path.relpath(self.sweep_dir / STUDY, run_dir),
                    study=_STUDY,
                    number=number,
                    metric=self._metric,
                    pruner=self._search.pruner,
                ).save(run_dir)
        return list(waiting.values())

    def _tell(self, study: "optuna.Study", number: int, job: Job) -> None:
        """Report the outcome of a trial to Optuna.

        Raises:
            ConfigError: if the runs do not measure the metric of the search.
        """
        from optuna.trial import TrialState

        state = self.state(job)
        if state == "finished":
            result = read_result(self.run_dir(job))
            value = result.get(self._metric) if self._metric.startswith("val_") else None
            if not isinstance(value, (int, float)):
                metric_names = [name for name in result if name.startswith("val_")]
                raise ConfigError(check_metric("hydra.sweeper.metric", self._metric, metric_names))
            if result.get("pruned"):
                study.tell(number, state=TrialState.PRUNED)
            elif math.isfinite(value):
                study.tell(number, value)
            else:
                self._fail(study, number)
        elif state in FAILED:
            self._fail(study, number)
        else:  # stopped: the job continues when the search is started again
            self._stopped_trials.add(number)

    def _fail(self, study: "optuna.Study", number: int) -> None:
        from optuna.trial import TrialState

        study.tell(number, state=TrialState.FAIL)
        self._failures += 1


def _differing_overrides(job: Job, first: Job) -> Sequence[str]:
    """Return the swept overrides of a job that `first` does not have; all its swept overrides if it equals `first`."""
    return [override for override in job.swept if override not in first.swept] or job.swept
