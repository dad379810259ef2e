"""The loop of a search: proposes trials, runs their jobs in free places, and records their results."""

import math
import os
import sys
import time
from typing import TYPE_CHECKING

from optuna.trial import TrialState

from foundry.config.metrics import check_metric
from foundry.config.schemas.evaluation import Direction
from foundry.config.schemas.sweeper import Search, Wait
from foundry.core.errors import ConfigError
from foundry.run_dir.names import STUDY
from foundry.run_dir.result import read_result
from foundry.run_dir.status import FAILED
from foundry.run_dir.trial import SHARED, TrialLink
from foundry.sweeps.job import Job
from foundry.sweeps.manifest import SweepManifest
from foundry.sweeps.search.proposals import Proposer
from foundry.sweeps.search.rungs import Rungs
from foundry.sweeps.search.search_space import Space
from foundry.sweeps.search.study import SearchStudy, StudyUnreachable
from foundry.sweeps.search.takeover import continue_from

if TYPE_CHECKING:
    from foundry.launch.job_queue import JobQueue
    from foundry.sweeps.search.blocking_queue import BlockingQueue
    from foundry.sweeps.sweeper import CheckedSweeper

_OTHERS_SECONDS = 1.0
"""Interval between looks at the trials of other commands."""


class SearchLoop:
    """Runs the trials of a search to their end.

    Without batches, a free place gets the next trial at once. With batches, `n_jobs` trials are proposed when no job is
    running, so that their proposals do not depend on the order of the jobs' ends.

    Args:
        sweeper: prepares and records jobs.
        options: settings of the search.
        study: study of the search.
        space: search space.
        proposer: proposes the values of a trial.
        manifest: jobs of earlier starts.

    Attributes:
        jobs: jobs of this start, by index.
        failures: number of trials of this start that have failed.
    """

    def __init__(
        self,
        sweeper: "CheckedSweeper",
        options: Search,
        study: SearchStudy,
        space: Space,
        proposer: Proposer,
        manifest: SweepManifest,
    ) -> None:
        self._sweeper, self._options = sweeper, options
        self._study, self._space, self._proposer = study, space, proposer
        self._manifest = manifest
        self._is_batch = study.wait is Wait.batch
        self._trials = dict[int, list[int]]()
        """Numbers of the trials of each active job, by the job's index; equal proposals have the same job."""
        self._stopped = set[int]()
        """Numbers of the trials whose jobs were stopped, and continue when the search is started again."""
        self._awaits_others = False
        self._rungs: Rungs | None = None
        if (asha := options.asha) is not None:
            is_minimized = options.direction is Direction.minimize
            self._rungs = Rungs(asha, study, metric=options.metric or "", minimize=is_minimized)
        self.jobs = dict[int, Job]()
        self.failures = 0

    def run(self, queue: "JobQueue | BlockingQueue") -> None:
        """Run all trials; after `max_failures` failed trials, start no more.

        Raises:
            ConfigError: if the sampler cannot be built, or the runs do not measure the metric of the search.
        """
        self._study.is_interrupted = lambda: queue.interrupted
        while True:
            try:
                is_over = self._advance(queue)
            except StudyUnreachable:
                is_over = not queue.next_ended()  # raises the exception of the signal after the running jobs have ended
            if is_over:
                break
        if self._rungs is not None and not self._stopped and not self._has_failed():
            self._prune_paused(self._rungs)
        if self._has_failed():
            sys.stderr.write(f"the search ends: {self.failures} jobs have failed (hydra.sweeper.max_failures)\n")

    def _advance(self, queue: "JobQueue | BlockingQueue") -> bool:
        """Start trials, wait until a job has ended, and record the results; return whether the search is over."""
        self._fill(queue)
        if ended := queue.next_ended():
            for job in ended:
                for number in self._trials.pop(job.index):
                    self._tell(number, self.jobs[job.index])
            return False
        if self._has_failed() or not self._study.awaits_others(self._options.n_trials):
            return True
        if not self._awaits_others:
            sys.stderr.write("the search waits for jobs of other commands; Ctrl-C ends this command only\n")
        self._awaits_others = True
        time.sleep(_OTHERS_SECONDS)
        return False

    def _fill(self, queue: "JobQueue | BlockingQueue") -> None:
        """Start trials while there are places and trials."""
        while (places := self._places(queue)) > 0:
            if not (numbers := self._next_trials(places)):
                return
            for number in numbers:
                self._start(number, queue)

    def _places(self, queue: "JobQueue | BlockingQueue") -> int:
        if self._is_batch:
            return 0 if self._trials else self._options.n_jobs
        return self._options.n_jobs if queue.free is None else queue.free

    def _next_trials(self, places: int) -> list[int]:
        """Return the numbers of the trials to run now: interrupted ones, else a promoted one, else new ones."""
        if self._has_failed():
            return []
        rungs = self._rungs
        busy = self._stopped.union(*self._trials.values(), rungs.paused() if rungs is not None else ())
        n_trials = self._options.n_trials
        numbers = self._study.interrupted(busy, places, n_trials)
        if not numbers:
            if rungs is not None and (number := rungs.promote()) is not None:
                return [number]
            new = [self._study.add_trial() for _ in range(min(places, n_trials - len(self._study.trials())))]
            numbers = [number for number in new if number < n_trials]  # another command may have added trials too
        return [number for number in numbers if self._study.complete(number, self._proposer)]

    def _has_failed(self) -> bool:
        """Return whether the search ends because of failed jobs."""
        limit = self._options.max_failures
        return limit is not None and self.failures >= limit

    def _start(self, number: int, queue: "JobQueue | BlockingQueue") -> None:
        """Start the job of a trial; if the job has finished or is running, use its result."""
        job = self._prepare(number)
        if job is None:
            self._fail(number)
            return
        self.jobs[job.index] = job
        if (former := self._study.run_dir(number)) is not None:
            continue_from(former, self._sweeper.run_dir(job), job.config_hash)
        self._manifest = self._sweeper.record(self._manifest, [job])
        if job.index in self._trials:
            self._trials[job.index].append(number)
        elif self._sweeper.state(job) == "finished" or self._is_at_rung(number, job):
            self._tell(number, job)
        else:
            self._trials[job.index] = [number]
            self._link(number, job)
            self._study.note_start(number, self._sweeper.run_dir(job))
            queue.add([self._sweeper.composed(job)])

    def _is_at_rung(self, number: int, job: Job) -> bool:
        return self._rungs is not None and self._rungs.is_reached(number, self._sweeper.run_dir(job))

    def _prune_paused(self, rungs: Rungs) -> None:
        """End the trials that wait at a rung, because no more jobs will compete with them."""
        folders = {job.id: self._sweeper.sweep_dir / job.dir for job in self._manifest.jobs}
        for number in rungs.paused():
            rungs.prune(number, folders[self._space.job(self._study.trials()[number].params).id])

    def _prepare(self, number: int) -> Job | None:
        """Return the job of a trial; None, with a line for the user, if the combination of its values is invalid."""
        job = self._space.job(self._study.trials()[number].params)
        try:
            (prepared,) = self._sweeper.prepare([job], self._manifest)
        except ConfigError as error:
            messages = "; ".join(violation.message for violation in error.violations)
            sys.stderr.write(f"{job.settings} is skipped: {messages}\n")
            return None
        return prepared

    def _link(self, number: int, job: Job) -> None:
        """Write a `TrialLink` or a `Rung` for the job of a trial, if the search has a pruner."""
        if self._rungs is not None:
            self._rungs.link(number, self._sweeper.run_dir(job))
        elif self._options.pruner is not None:
            run_dir = self._sweeper.run_dir(job)
            is_shared = self._study.commands is not None
            TrialLink(
                journal=SHARED if is_shared else os.path.relpath(self._sweeper.sweep_dir / STUDY, run_dir),
                study=self._study.name,
                number=number,
                metric=self._options.metric or "",
                pruner=self._options.pruner,
            ).save(run_dir)

    def _tell(self, number: int, job: Job) -> None:
        """Record the outcome of a trial in the study.

        Raises:
            ConfigError: if the runs do not measure the metric of the search.
        """
        state = self._sweeper.state(job)
        if state == "finished":
            value, is_pruned = self._result(job)
            if is_pruned:
                self._record(number, state=TrialState.PRUNED)
            elif math.isfinite(value):
                self._record(number, value)
            else:
                self._fail(number)
        elif self._rungs is not None and self._is_at_rung(number, job):
            self._rungs.report(number, self._sweeper.run_dir(job), self._result(job)[0])
        elif state in FAILED:
            self._fail(number)
        else:
            self._stopped.add(number)
            self._study.note_stop(number)

    def _result(self, job: Job) -> tuple[float, bool]:
        """Return the value of the metric of a finished or paused job, and whether the job was pruned.

        Raises:
            ConfigError: if the runs do not measure the metric of the search.
        """
        result, metric = read_result(self._sweeper.run_dir(job)), self._options.metric or ""
        value = result.get(metric) if metric.startswith("val_") else None
        if not isinstance(value, (int, float)):
            metric_names = [name for name in result if name.startswith("val_")]
            raise ConfigError(check_metric("hydra.sweeper.metric", metric, metric_names))
        return value, bool(result.get("pruned"))

    def _fail(self, number: int) -> None:
        self._record(number, state=TrialState.FAIL)
        self.failures += 1

    def _record(self, number: int, value: float | None = None, *, state: TrialState | None = None) -> None:
        if not self._study.tell(number, value, state=state):
            sys.stderr.write(f"trial {number}: its result is dropped, because another command runs the trial now\n")
