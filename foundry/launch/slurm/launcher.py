"""`hydra/launcher=slurm`, and `submitit_slurm` of hydra-submitit-launcher: the jobs of a sweep on a Slurm cluster.

submitit writes the batch script, submits the jobs as an array, and requeues a job at its time limit. The result of a
job is read from its run directory and from Slurm's controller, so no accounting database is needed.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry.config.schemas.launcher import GROUP, Slurm, resolve_launcher
from foundry.core.errors import ConfigError, Violation
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import JobState, Unreachable
from foundry.launch.launchers import FrozenLauncher
from foundry.launch.slurm.end import Submission
from foundry.launch.slurm.open_submission import settle_open_submission
from foundry.launch.slurm.queue import cancel, cluster_name, partitions, query, query_twice
from foundry.launch.slurm.submission import check_script, submit
from foundry.launch.slurm.task import SlurmTask
from foundry.launch.snapshot import snapshot


class SlurmLauncher(FrozenLauncher):
    """Launcher that submits jobs, and waits for them unless `detach` is set."""

    title = "Slurm"
    survives = True

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        super().__init__(work, **settings)
        self._checked_settings: list[Slurm] = []
        self._submissions = dict[str, Submission]()

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

    def submit(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Submit jobs, those with the same settings as an array.

        Raises:
            ConfigError: Slurm rejects an array.
            Unreachable: Slurm does not respond; jobs that were submitted are found by `attach`.
        """
        ids, cluster, sweep_dir = dict[int, str](), cluster_name(), Path(self.sweep_dir).absolute()
        for settings, indices in _group_by_settings(job.config for job in jobs):
            group = [jobs[index] for index in indices]
            code = snapshot(sweep_dir) if settings.snapshot_code else None
            run_dirs = [job.run_dir for job in group]
            task = SlurmTask(self.work)
            notes = submit(task, settings, run_dirs, sweep_dir=sweep_dir, cluster=cluster, code=code)
            ids |= {job.index: note.job_id for job, note in zip(group, notes, strict=True)}
            self._submissions |= {note.job_id: note for note in notes}
        return ids

    def attach(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Return, by job index, the Slurm ids of jobs that are in the queue; delete the other jobs' submissions.

        If an earlier command has recorded no ids of the jobs that it was submitting, they are looked up first.

        Raises:
            ConfigError: the record of the earlier command is damaged.
            Unreachable: Slurm does not respond, or may still receive the jobs of the earlier command.
        """
        settle_open_submission(Path(self.sweep_dir).absolute())
        notes = {job: note for job in jobs if (note := Submission.load(job.run_dir)) is not None}
        if not notes:
            return {}
        cluster = cluster_name()
        queued_jobs = query_twice([note.job_id for note in notes.values() if note.cluster == cluster])
        ids = {}
        for job, note in notes.items():
            state = queued_jobs.get(note.job_id) if note.cluster == cluster else None
            if state is not None and not state.has_ended:
                ids[job.index] = note.job_id
                self._submissions[note.job_id] = note
            else:
                Submission.forget(job.run_dir)
        return ids

    def poll(self, ids: Collection[str]) -> dict[str, JobState]:
        """Query Slurm for the states of jobs."""
        return {job_id: job.as_job_state() for job_id, job in query(ids).items()}

    def cancel(self, ids: Collection[str], *, kill: bool = False) -> None:
        """Cancel jobs; Slurm sends SIGTERM first unless `kill` is set."""
        cancel(ids, kill=kill)

    def logs(self, job_id: str) -> str:
        """Return the last line of a job's error output."""
        return self._submissions[job_id].last_output()

    def format_ids(self, ids: Iterable[str]) -> str:
        """Return ids of jobs as text, each array once."""
        return ", ".join(_arrays(ids))

    def cancel_command(self, ids: Iterable[str]) -> str:
        """Return the `scancel` command for jobs."""
        return f"scancel {' '.join(_arrays(ids))}"


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


def _last_line(error: Unreachable) -> str:
    return (str(error).splitlines() or [""])[-1]


def _arrays(ids: Iterable[str]) -> Iterable[str]:
    """Return the ids of jobs, with an array in place of its tasks."""
    return dict.fromkeys(job_id.partition("_")[0] for job_id in ids)
