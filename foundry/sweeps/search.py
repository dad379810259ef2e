"""`hydra/sweeper=optuna`: a sweep whose jobs Optuna proposes, each by the results of those before it.

The study is kept in the sweep's directory, in a file of JSON lines. What Optuna proposes as number k depends on the
seed, on k and on the results so far, and on nothing else: an interrupted search continues as if it had not been.
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
from foundry.config.schemas.evaluation import Direction
from foundry.config.schemas.sweeper import Search
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.names import STUDY
from foundry.run_dir.result import read_result
from foundry.run_dir.status import FAILED
from foundry.run_dir.trial import TrialLink, open_storage
from foundry.sweeps.compose_jobs import compose_jobs
from foundry.sweeps.job import Job
from foundry.sweeps.manifest import SweepManifest
from foundry.sweeps.sweeper import CheckedSweeper

if TYPE_CHECKING:
    import optuna

    from foundry.sweeps.search_space import Space

_STUDY = "search"
_FACTS = "facts"


class OptunaSweeper(CheckedSweeper):
    """Runs what Optuna proposes; the options are those of `Search`."""

    def __init__(
        self,
        *,
        params: Mapping[str, str],
        metric: str | None,
        direction: Direction,
        n_trials: int,
        n_jobs: int,
        max_failures: int | None,
        sampler: Mapping[str, Any],
        pruner: Mapping[str, Any] | None,
    ) -> None:
        self.options = self._search = Search(
            params=dict(params),
            metric=metric,
            direction=direction,
            n_trials=n_trials,
            n_jobs=n_jobs,
            max_failures=max_failures,
            sampler=_plain(sampler),
            pruner=None if pruner is None else _plain(pruner),
        )
        self._metric = metric or ""
        self._failures, self._left = 0, set[int]()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher, as the other sweepers do.

        Raises:
            ConfigError: Optuna is not installed, or jobs would be left to themselves.
        """
        try:
            import optuna
        except ImportError:
            message = missing_message("optuna", "search")
            raise ConfigError(Violation("hydra/sweeper", message)) from None
        if OmegaConf.select(config, "hydra.launcher.detach"):
            message = "is true but a search proposes jobs by the results of others, and has to wait for them"
            raise ConfigError(Violation("hydra.launcher.detach", message))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def run(self, overrides: Sequence[Override]) -> list[Sequence[JobReturn]]:
        """Check the ends of every key's values, then propose and run until there are enough jobs."""
        from foundry.sweeps.search_space import Space

        space = Space.parse(overrides)
        manifest = self.begin()
        self._check(space, manifest)
        jobs, results = dict[int, Job](), list[Sequence[JobReturn]]()
        with self.running():
            study = self._open(space)
            while numbers := self._next(study, space):
                batch = dict[int, Job]()
                for number in numbers:
                    if (job := self._prepare(study, space, number, manifest)) is not None:
                        batch[number] = job
                        manifest = manifest.with_jobs([job])
                self.record(manifest, list(batch.values()))
                if waiting := self._waiting(batch):
                    results.append(self.launch(waiting))
                for number, job in batch.items():
                    self._tell(study, number, job)
                    jobs[job.index] = job
        self.report(list(jobs.values()))
        if self._failures:
            raise SystemExit(1)
        return results

    def _check(self, space: "Space", manifest: SweepManifest) -> None:
        """Refuse a search before anything is written.

        Raises:
            ConfigError: a value at an end, or a choice, is wrong; or the directory holds another search.
        """
        import optuna

        points = list[dict[str, Any]]()
        if (self.sweep_dir / STUDY).is_file():
            storage = open_storage(self.sweep_dir / STUDY)
            if _STUDY in optuna.get_all_study_names(storage):  # a kill may have come before
                study = optuna.load_study(study_name=_STUDY, storage=storage)
                self._check_same(study, space)
                points = [trial.params for trial in study.get_trials(deepcopy=False)]
        elif manifest.jobs:
            message = f"is {self.sweep_dir}, which holds a sweep that is no search; choose another"
            raise ConfigError(Violation("hydra.sweep.dir", message))
        sampler = self._built("sampler", self._sampler_node(0))
        if self._search.pruner is not None:
            self._built("pruner", self._search.pruner)
        first = optuna.create_study(sampler=sampler).ask(space.distributions)
        self._check_corners(space, first.params)
        known = {job.id: job for job in map(space.job, [first.params, *points])}
        self.prepare(list(known.values()), manifest)

    def _check_corners(self, space: "Space", values: dict[str, Any]) -> None:
        """Compose a point, and those that differ from it in one key, which is at an end of its values.

        Raises:
            ConfigError: with each error once.
        """
        corners = list(space.corners(values))
        results = compose_jobs(self.hydra_context.config_loader, self.config, [job.overrides for job in corners])
        wrong = dict[Violation, list[Job]]()
        for job, result in zip(corners, results, strict=True):
            for violation in dict.fromkeys(result.violations) if isinstance(result, ConfigError) else ():
                wrong.setdefault(violation, []).append(job)
        if wrong:
            raise ConfigError(
                violation
                if len(jobs) == len(corners)
                else Violation(f"with {', '.join(_others(jobs[0], corners[0]))}", str(violation))
                for violation, jobs in wrong.items()
            )

    def _check_same(self, study: "optuna.Study", space: "Space") -> None:
        """Refuse to resume a search for something else.

        Raises:
            ConfigError: it had other values, or another metric.
        """
        now = self._facts(space)
        was = study.user_attrs.get(_FACTS, now)
        text = [f"{key} {was.get(key, 'not searched')}" for key in {**was, **now} if was.get(key) != now.get(key)]
        if text:
            message = f"is {self.sweep_dir}, which holds a search with {', '.join(text)}; give that, or choose another"
            raise ConfigError(Violation("hydra.sweep.dir", message))

    def _facts(self, space: "Space") -> dict[str, str]:
        """What may not change while a search continues."""
        searched = {dimension.key: str(dimension.distribution) for dimension in space.dimensions}
        return {**searched, "metric": self._metric, "direction": self._search.direction.value}

    def _open(self, space: "Space") -> "optuna.Study":
        """The study of the sweep's directory, begun if need be."""
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
        """What proposes trial `number`, whatever has been proposed before."""
        node, seed = self._search.sampler, self._search.sampler.get("seed")
        if seed is None:
            return node
        # Their sum would have the search with the next seed propose the same points, one trial earlier.
        digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
        return {**node, "seed": int.from_bytes(digest[:4])}

    def _built(self, name: str, node: Mapping[str, Any]) -> Any:
        """A part of Optuna.

        Raises:
            ConfigError: there is none such, or it takes other arguments.
        """
        try:
            return build_part(name, node)
        except (TypeError, ValueError) as error:
            text = " ".join(str(error.__cause__ or error).splitlines()[:2])
            raise ConfigError(Violation(f"hydra.sweeper.{name}", f"cannot be built: {text}")) from None

    def _next(self, study: "optuna.Study", space: "Space") -> list[int]:
        """The trials to run now: those that were interrupted, then new ones; none when there are enough."""
        from optuna.trial import TrialState

        trials = study.get_trials(deepcopy=False)
        running = [trial.number for trial in trials if trial.state is TrialState.RUNNING]
        if interrupted := [number for number in running if number not in self._left]:
            return interrupted[: self._search.n_jobs]
        if self._search.max_failures is not None and self._failures >= self._search.max_failures:
            sys.stderr.write(f"the search ends: {self._failures} jobs have failed (hydra.sweeper.max_failures)\n")
            return []
        new = range(len(trials), min(len(trials) + self._search.n_jobs, self._search.n_trials))
        return [self._ask(study, space, number) for number in new]

    def _ask(self, study: "optuna.Study", space: "Space", number: int) -> int:
        study.sampler = self._built("sampler", self._sampler_node(number))
        return study.ask(space.distributions).number

    def _prepare(self, study: "optuna.Study", space: "Space", number: int, manifest: SweepManifest) -> Job | None:
        """A trial as a job; None where its values do not go together, which counts as a failure."""
        job = space.job(study.get_trials(deepcopy=False)[number].params)
        try:
            (prepared,) = self.prepare([job], manifest)
        except ConfigError as error:
            sys.stderr.write(
                f"{job.settings} is not run: {'; '.join(violation.message for violation in error.violations)}\n"
            )
            self._fail(study, number)
            return None
        return prepared

    def _waiting(self, batch: Mapping[int, Job]) -> list[Job]:
        """The jobs of a batch that have not finished, each once; they are told which trial they are."""
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
        """Tell Optuna what came of a trial.

        Raises:
            ConfigError: runs do not measure what they are to be compared by.
        """
        from optuna.trial import TrialState

        state = self.state(job)
        if state == "finished":
            result = read_result(self.run_dir(job))
            value = result.get(self._metric) if self._metric.startswith("val_") else None
            if not isinstance(value, (int, float)):
                known = [name for name in result if name.startswith("val_")]
                raise ConfigError(check_metric("hydra.sweeper.metric", self._metric, known))
            if result.get("pruned"):
                study.tell(number, state=TrialState.PRUNED)
            elif math.isfinite(value):
                study.tell(number, value)
            else:
                self._fail(study, number)
        elif state in FAILED:
            self._fail(study, number)
        else:  # it was stopped, and continues when the search is started again
            self._left.add(number)

    def _fail(self, study: "optuna.Study", number: int) -> None:
        from optuna.trial import TrialState

        study.tell(number, state=TrialState.FAIL)
        self._failures += 1


def _others(job: Job, first: Job) -> Sequence[str]:
    """The values of a job that the first has not; all of its own for the first itself."""
    return [override for override in job.swept if override not in first.swept] or job.swept


def _plain(node: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in node.items()}
