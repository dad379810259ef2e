"""Queue of a sweep's jobs: it starts, watches and settles the jobs of every launcher."""

import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hydra.core.utils import setup_globals

from foundry.config.schemas.tracking import JSON
from foundry.core.errors import ConfigError, counted
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import JobState, Phase, Unreachable
from foundry.launch.ledger import Ledger, say
from foundry.launch.local import block_interrupts, collect_signals, signal_exception
from foundry.launch.settle import settle
from foundry.run_dir.lock import is_held
from foundry.run_dir.status import ENDED, read_status, write_status

if TYPE_CHECKING:
    from foundry.launch.launchers import FrozenLauncher

_GLANCE_SECONDS = 0.01  # per job: interval between reads of the jobs' status.json


class JobQueue:
    """Jobs of a sweep that wait for a place, and jobs that their launcher runs.

    Use it in a `with` block. When the block ends normally, no job is running, except for jobs that were detached.

    After the first signal no further job starts, and the running jobs save and stop; a second Ctrl-C kills them. If the
    jobs continue without this process, Ctrl-C asks instead whether to cancel them.

    Args:
        launcher: starts, polls and cancels the jobs.
        limit: maximum number of jobs at a time; None for as many as the launcher runs.
    """

    def __init__(self, launcher: "FrozenLauncher", *, limit: int | None = None) -> None:
        self._launcher = launcher
        self._limit = limit
        self._is_open, self._has_places = False, False
        self._waiting = deque[ComposedJob]()
        self._active = dict[str, ComposedJob]()
        """Submitted jobs by the launcher's id."""
        self._ended = list[ComposedJob]()
        """Jobs that have ended since the last call of `next_ended`."""
        is_json = launcher.in_process and launcher.master.tracking.progress == JSON
        self._ledger = Ledger(stream=sys.stderr if is_json else None)  # JSON must be alone on standard output
        self._stack = ExitStack()
        self._signals: Sequence[signal.Signals] = []
        self._due, self._canceled = 0, 0
        """Request that is due for the running jobs, and the last one made: none (0), save and stop (1), kill (2)."""
        self._interval, _ = launcher.poll_seconds
        self._suspects = set[str]()
        self._states = dict[str, str | None]()
        self._has_warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if self._launcher.survives:
                if self._waiting and not isinstance(error, ConfigError):
                    resume = f"the same command with hydra.sweep.dir={self._launcher.sweep_dir} submits them"
                    say(f"{counted(len(self._waiting), 'job')} not submitted; {resume}")
                if isinstance(error, KeyboardInterrupt):
                    self._ask()
                elif error is not None and self._active:
                    self._leave()
            elif not self._launcher.in_process:
                self._end(error)

    def add(self, jobs: Sequence[ComposedJob]) -> None:
        """Start as many jobs as there are free places, and queue the rest.

        Raises:
            ConfigError: the machine or the cluster refuses a job.
            Stopped: a job that ran in this process was stopped by a signal.
        """
        if not self._is_open:
            self._open(jobs)
        self._ledger.add(jobs)
        self._waiting.extend(jobs)
        self._start()

    def next_ended(self) -> list[ComposedJob]:
        """Wait until a job has ended; return all jobs that have ended since the last call, with status.json settled.

        Returns:
            The jobs; empty if no job is left.

        Raises:
            KeyboardInterrupt: Ctrl-C arrived, and the running jobs have ended.
            SystemExit: another signal arrived, and the running jobs have ended; the code is 128 + its number.
            Stopped: a job that ran in this process was stopped by a signal.
        """
        while True:
            self._obey()
            self._start()
            if self._ended and not self._signals:
                ended, self._ended = self._ended, []
                return ended
            if not self._active and (self._signals or not self._waiting):
                break
            self._wait()
            self._poll()
        if self._signals:
            raise signal_exception(self._signals[0])
        return []

    @property
    def free(self) -> int | None:
        """Number of jobs that would start at once if they were added; None for any number; 0 after a signal."""
        if self._signals:
            return 0
        return None if self._limit is None else max(0, self._limit - len(self._active) - len(self._waiting))

    @property
    def interrupted(self) -> bool:
        """Whether a signal has arrived, so that no further job starts."""
        return bool(self._signals)

    def detach(self) -> None:
        """Leave the jobs running when all of them are submitted; they are not watched any more.

        Raises:
            KeyboardInterrupt: Ctrl-C arrived while the scheduler did not respond.
        """
        while self._waiting and not self._signals:
            self._wait()
            self._poll()
            self._start()
        self._leave()

    def _leave(self) -> None:
        """Leave the submitted jobs running, and tell the user how to watch and cancel them."""
        launcher, ids = self._launcher, list(self._active)
        launcher.detached = True
        self._active.clear()
        say(f"{counted(len(ids), 'job')} left in the queue: {launcher.format_ids(ids)}")
        say(f"to watch them: python -m foundry.report dir={Path(launcher.sweep_dir).absolute()} watch=true")
        if command := launcher.cancel_command(ids):
            say(f"to cancel them: {command}")

    def _open(self, jobs: Sequence[ComposedJob]) -> None:
        """Prepare the launcher; after that, collect signals unless the jobs handle or survive them."""
        setup_globals()
        launcher = self._launcher
        limit = len(jobs) if self._limit is None else self._limit
        places = launcher.places([job.config for job in jobs], limit)
        if places is not None:
            self._has_places, self._limit = True, min(places, limit)
        if not launcher.in_process and not launcher.survives:
            self._signals = self._stack.enter_context(collect_signals())
        self._is_open = True

    def _start(self) -> None:
        """Start waiting jobs in free places, unless a signal has arrived."""
        while self._waiting and not self._signals:
            count = len(self._waiting) if self._limit is None else self._limit - len(self._active)
            if count <= 0:
                return
            jobs = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            locked_jobs = [job for job in jobs if self._launcher.skips_locked and is_held(job.run_dir)]
            for job in locked_jobs:
                self._ledger.note(job, "running", "in another process; this process does not wait for it")
                self._ended.append(job)
            # A job that was submitted but not recorded would be submitted again.
            with block_interrupts() if self._launcher.survives else nullcontext():
                try:
                    self._submit([job for job in jobs if job not in locked_jobs])
                    self._has_warned = False
                except Unreachable as error:
                    self._warn(error)
                    return
                finally:
                    started_jobs = {*self._active.values(), *locked_jobs}
                    self._waiting.extendleft(job for job in reversed(jobs) if job not in started_jobs)

    def _submit(self, jobs: Sequence[ComposedJob]) -> None:
        """Submit jobs; watch a job that an earlier command submitted."""
        launcher = self._launcher
        attached = launcher.attach(jobs)
        for job in jobs:
            if job.index in attached:
                say(f"{job} is already in the queue as {attached[job.index]}")
                self._active[attached[job.index]] = job
        new_jobs = [job for job in jobs if job.index not in attached]
        for job in new_jobs:
            launcher.prepare(job)
            if self._has_places and not launcher.has_queue:
                self._ledger.note(job, "running")
        try:
            ids = launcher.submit(new_jobs) if new_jobs else {}
        except ConfigError:
            self._find_submitted(new_jobs)
            raise
        if missing_jobs := [str(job) for job in new_jobs if job.index not in ids]:
            raise ValueError(f"{type(launcher).__name__}.submit returned no id of {', '.join(missing_jobs)}")
        self._active |= {ids[job.index]: job for job in new_jobs}
        if launcher.survives and jobs:
            all_ids = {**attached, **ids}.values()
            say(f"{counted(len(all_ids), 'job')} in the queue: {launcher.format_ids(all_ids)}")

    def _find_submitted(self, jobs: Sequence[ComposedJob]) -> None:
        """Watch the jobs that were submitted before the scheduler refused another one."""
        with suppress(ConfigError, Unreachable):
            attached = self._launcher.attach(jobs)
            self._active |= {attached[job.index]: job for job in jobs if job.index in attached}

    def _wait(self) -> None:
        """Wait until the next poll is due, at growing intervals, or a job's status.json changes."""
        first, last = self._launcher.poll_seconds
        if first == last:
            self._launcher.wait(first)
            return
        deadline = time.monotonic() + self._interval
        self._interval = min(1.1 * self._interval, last)
        glance_interval = max(first, _GLANCE_SECONDS * len(self._active))
        while (remaining := deadline - time.monotonic()) > 0:
            self._launcher.wait(min(glance_interval, remaining))
            states = {job_id: read_status(job.run_dir).get("state") for job_id, job in self._active.items()}
            if states != self._states or self._due > self._canceled or (self._signals and not self._due):
                self._states = states
                return

    def _poll(self) -> None:
        """Note the state of each job, and settle the jobs that have ended."""
        if not self._active:
            return
        try:
            states = self._launcher.poll(list(self._active))
        except Unreachable as error:
            self._warn(error)
            return
        self._has_warned = False
        for job_id, job in list(self._active.items()):
            state, recorded = states.get(job_id), read_status(job.run_dir).get("state", "queued")
            if state is not None and state.phase is not Phase.ENDED:
                self._suspects.discard(job_id)
                is_waiting = state.phase is Phase.WAITING
                phase = ("requeued" if recorded == "requeued" else "queued") if is_waiting else "running"
                self._ledger.note(job, phase, state.detail)
            elif recorded in ENDED or job_id in self._suspects:
                self._settle(job_id, state)
            else:  # look twice: a scheduler may briefly report a job that it is about to requeue as ended
                self._suspects.add(job_id)
                self._interval, _ = self._launcher.poll_seconds

    def _settle(self, job_id: str, end: JobState | None) -> None:
        """Record the end of a job."""
        job = self._active[job_id]
        if self._signals and job.state not in ("finished", "paused", "failed"):
            write_status(job.run_dir, state="stopped", reason=self._signals[0].name)
        else:
            last_output = ""
            if job.state not in ENDED and end is not None:
                with suppress(Unreachable):  # the end is recorded without it
                    last_output = self._launcher.logs(job_id)
            settle(job.run_dir, job_id, end, scheduler=self._launcher.title, last_output=last_output)
        del self._active[job_id]  # last, so that Ctrl-C finds a job whose end is not recorded
        self._suspects.discard(job_id)
        self._ended.append(job)
        self._ledger.note_end(job)

    def _obey(self) -> None:
        """After the first signal, let the jobs save and stop; kill them after a second Ctrl-C.

        If the launcher does not respond, a third Ctrl-C ends the wait.
        """
        num_interrupts = self._signals.count(signal.SIGINT)
        due = max(self._due, min(len(self._signals), 1) + (num_interrupts > 1))
        if not self._active or due == self._canceled:
            return
        if self._signals and not self._due:
            text = f"{len(self._active)} running (saving and stopping), {len(self._waiting)} queued"
            say(f"{self._signals[0].name}: {text}; a second Ctrl-C kills the running jobs")
        self._due = due
        try:
            self._launcher.cancel(list(self._active), kill=due == 2)
            self._canceled = due
        except Unreachable as error:
            self._warn(error)
            if num_interrupts > 2:
                say(f"{self._launcher.format_ids(self._active)} may still be running")
                self._active.clear()

    def _stop(self) -> None:
        """Let the running jobs save and stop, and wait for their ends."""
        self._due = 1
        while self._active:
            self._obey()
            self._wait()
            self._poll()

    def _warn(self, error: Unreachable) -> None:
        if not self._has_warned:
            say(f"{self._launcher.title} does not respond, the wait continues: {error}")
        self._has_warned = True

    def _end(self, error: BaseException | None) -> None:
        """Stop the jobs that an exception has left; raise the exception of a signal that arrived after the last job."""
        self._stop()
        if self._signals or isinstance(error, KeyboardInterrupt):
            say(f"the same command with hydra.sweep.dir={self._launcher.sweep_dir} resumes from there")
        if error is None and self._signals:
            raise signal_exception(self._signals[0])

    def _ask(self) -> None:
        """Let the user choose whether to cancel jobs that would continue without this process."""
        if not self._active:
            return
        if not _ask_to_cancel():
            self._leave()
            return
        say("canceled; running jobs save a checkpoint first")
        try:
            self._stop()
        except KeyboardInterrupt:
            self._leave()
            raise


def _ask_to_cancel() -> bool:
    """Ask the user whether to cancel the jobs; False without a terminal, or on another Ctrl-C."""
    if not sys.stdin.isatty():
        return False
    try:
        say("\nCancel the jobs (c), or let them continue without this process (any other key)?")
        return input().strip().lower().startswith("c")
    except (KeyboardInterrupt, EOFError):
        say("")
        return False
