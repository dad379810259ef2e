"""`hydra/launcher=slurm`, and `submitit_slurm` of hydra-submitit-launcher: the jobs of a sweep on a Slurm cluster.

submitit writes the batch script, submits the jobs as an array, and requeues a job at its time limit. The result of a
job is read from its run directory and from Slurm's controller, so no accounting database is needed.
"""

import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry.config.schemas.launcher import GROUP, Slurm, resolve_launcher
from foundry.core.errors import ConfigError, Violation, counted
from foundry.launch.launchers import ComposedJob, FrozenLauncher, Ledger, say
from foundry.launch.local import block_interrupts
from foundry.launch.slurm_end import Submission, settle
from foundry.launch.slurm_queue import QueuedJob, Unreachable, cancel, cluster_name, partitions, query
from foundry.launch.slurm_submission import check_script, submit
from foundry.launch.slurm_task import SlurmTask
from foundry.launch.snapshot import snapshot
from foundry.run_dir.status import ENDED, read_status

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 1.0, 15.0
_GLANCE_SECONDS = 0.01  # per job: interval between reads of the jobs' status.json


class SlurmLauncher(FrozenLauncher):
    """Launcher that submits jobs, and waits for them unless `detach` is set."""

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        super().__init__(work, **settings)
        self._checked_settings: list[Slurm] = []

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Check that the cluster accepts the jobs.

        Raises:
            ConfigError: the cluster does not accept a job, or does not respond; the message has the reason.
        """
        for settings, indices in _group_by_settings(configs):
            if settings in self._checked_settings:
                continue
            at_a_time = OmegaConf.select(configs[indices[0]], "hydra.sweeper.max_batch_size") or len(indices)
            try:
                check_partition(settings)
                check_script(settings, min(at_a_time, len(indices)))
            except Unreachable as error:
                message = f"is {settings.option} but Slurm does not respond: {_last_line(error)}"
                raise ConfigError(Violation(GROUP, message)) from None
            self._checked_settings.append(settings)

    def run(self, jobs: Sequence[ComposedJob]) -> None:
        """Submit the jobs that are not in the queue yet, and wait for all jobs unless `detach` is set.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the wait; at a terminal, the user has chosen whether to cancel the jobs.
        """
        self.check([job.config for job in jobs])
        sweep_dir = Path(str(self._master.hydra.sweep.dir)).absolute()
        ids = _find_queued(jobs)
        for job in jobs:
            if job.index in ids:
                say(f"{job} is already in the queue as {ids[job.index]}")
        try:
            with block_interrupts():  # a job that was submitted but not recorded would be submitted again
                ids |= _submit(self.work, [job for job in jobs if job.index not in ids], sweep_dir)
            if _resolve_settings(self._master).detach:
                self._detach(ids, sweep_dir)
                return
            say(f"{_count_text(ids)} in the queue: {_ids_text(ids.values())}")
            _Watch(jobs, ids).run()
        except KeyboardInterrupt:
            if _ask_to_cancel():
                cancel(ids.values())
                say("canceled; running jobs save a checkpoint first")
                _Watch(jobs, ids).run()
            else:
                self._detach(ids, sweep_dir)
            raise

    def _detach(self, ids: dict[int, str], sweep_dir: Path) -> None:
        self.detached = True
        say(f"{_count_text(ids)} left in the queue: {_ids_text(ids.values())}")
        say(f"to watch them: python -m foundry.report dir={sweep_dir.absolute()} watch=true")
        say(f"to cancel them: scancel {_ids_text(ids.values(), ' ')}")


def check_partition(settings: Slurm) -> None:
    """Check that the partition of a job exists and allows the job's time limit.

    Slurm does not reject a job whose time limit exceeds the partition's, but never starts it.

    Raises:
        ConfigError: the partition does not exist or has a lower time limit, none is set and the cluster has no default,
            or Slurm is not installed.
    """
    if shutil.which("sbatch") is None:
        message = "but there is no sbatch on this machine; submit from a login node, or choose hydra/launcher=local"
        raise ConfigError(Violation(GROUP, f"is {settings.option} {message}"))
    limits, default = partitions()
    partition = settings.partition or default
    available = f"available partitions: {', '.join(limits)}"
    if partition is None:
        raise ConfigError(
            Violation("hydra.launcher.partition", f"has no value and the cluster has no default; {available}")
        )
    if unknown := [name for name in partition.split(",") if name not in limits]:
        raise ConfigError(
            Violation("hydra.launcher.partition", f"is {unknown[0]}, which is not a partition here; {available}")
        )
    limit = max(limits[name] for name in partition.split(","))
    if settings.timeout_min > limit:
        message = (
            f"is {settings.timeout_min} but partition {partition} allows {limit:g}; lower it: jobs are queued again "
            "after their limit"
        )
        raise ConfigError(Violation("hydra.launcher.timeout_min", message))


class _Watch:
    """Waits for jobs, and prints each change of their states."""

    def __init__(self, jobs: Sequence[ComposedJob], ids: dict[int, str]) -> None:
        self._active = {job: ids[job.index] for job in jobs}
        self._ledger = Ledger(jobs)
        self._suspects: set[str] = set()
        self._interval = _FIRST_POLL_SECONDS
        self._has_warned = False
        self._states = dict[ComposedJob, str | None]()

    def run(self) -> None:
        """Poll Slurm until every job has ended."""
        while self._active:
            self._wait()
            try:
                queued_jobs = query(list(self._active.values()))
            except Unreachable as error:
                if not self._has_warned:
                    say(f"Slurm does not respond, the wait continues: {error}")
                self._has_warned = True
                continue
            for job, job_id in list(self._active.items()):
                self._update(job, job_id, queued_jobs.get(job_id))

    def _wait(self) -> None:
        """Wait until the next query of Slurm is due, at growing intervals, or a job's status.json changes."""
        deadline = time.monotonic() + self._interval
        self._interval = min(1.1 * self._interval, _LAST_POLL_SECONDS)
        interval = max(_FIRST_POLL_SECONDS, _GLANCE_SECONDS * len(self._active))
        while (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(interval, remaining))
            states = {job: read_status(job.run_dir).get("state") for job in self._active}
            if states != self._states:
                self._states = states
                return

    def _update(self, job: ComposedJob, job_id: str, queued_job: QueuedJob | None) -> None:
        state = read_status(job.run_dir).get("state", "queued")
        if queued_job is not None and not queued_job.has_ended:
            self._suspects.discard(job_id)
            if queued_job.is_waiting:
                self._ledger.note(job, "requeued" if state == "requeued" else "queued", queued_job.reason)
            else:
                self._ledger.note(job, "running", queued_job.nodes)
        elif state in ENDED or job_id in self._suspects:
            settle(job.run_dir, job_id, queued_job)
            self._ledger.note_end(job)
            del self._active[job]
        else:  # look twice: Slurm briefly reports a job that it is about to requeue as ended
            self._suspects.add(job_id)
            self._interval = _FIRST_POLL_SECONDS


def _resolve_settings(config: DictConfig) -> Slurm:
    settings = resolve_launcher(config)
    assert isinstance(settings, Slurm)
    return settings


def _group_by_settings(configs: Iterable[DictConfig]) -> list[tuple[Slurm, list[int]]]:
    """Group jobs with the same settings, which can share an array; returns settings and job indices of each group."""
    groups: list[tuple[Slurm, list[int]]] = []
    for index, config in enumerate(configs):
        settings = _resolve_settings(config)
        group = next((group for key, group in groups if key == settings), None)
        if group is None:
            groups.append((settings, [index]))
        else:
            group.append(index)
    return groups


def _submit(work: Callable[[Path], int], jobs: Sequence[ComposedJob], sweep_dir: Path) -> dict[int, str]:
    """Submit jobs, those with the same settings as an array, and return their Slurm job ids by job index.

    Raises:
        ConfigError: Slurm rejects an array.
    """
    if not jobs:
        return {}
    ids, cluster = dict[int, str](), cluster_name()
    for settings, indices in _group_by_settings(job.config for job in jobs):
        group = [jobs[index] for index in indices]
        code = snapshot(sweep_dir) if settings.snapshot_code else None
        submitted = submit(SlurmTask(work), settings, [job.run_dir for job in group], code)
        for job, (job_id, error_output) in zip(group, submitted, strict=True):
            ids[job.index] = job_id
            Submission(job_id=job_id, error_output=str(error_output), cluster=cluster).save(job.run_dir)
    return ids


def _find_queued(jobs: Iterable[ComposedJob]) -> dict[int, str]:
    """Return, by job index, the Slurm ids of jobs that an earlier start of the sweep submitted and that have not ended.

    If a job has ended or is on another cluster, its submission is deleted from the run directory.
    """
    notes = {job: note for job in jobs if (note := Submission.load(job.run_dir)) is not None}
    if not notes:
        return {}
    cluster = cluster_name()
    queued_jobs = query([note.job_id for note in notes.values()])
    ids = {}
    for job, note in notes.items():
        if note.cluster == cluster and note.job_id in queued_jobs and not queued_jobs[note.job_id].has_ended:
            ids[job.index] = note.job_id
        else:
            Submission.forget(job.run_dir)
    return ids


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


def _last_line(error: Unreachable) -> str:
    return (str(error).splitlines() or [""])[-1]


def _count_text(ids: Collection[int]) -> str:
    return counted(len(ids), "job")


def _ids_text(ids: Iterable[str], separator: str = ", ") -> str:
    """Join the Slurm ids of jobs, listing each array once."""
    return separator.join(dict.fromkeys(job_id.partition("_")[0] for job_id in ids))
