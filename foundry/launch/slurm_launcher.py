"""`hydra/launcher=slurm`: the jobs of a sweep on a Slurm cluster.

submitit writes the batch script, submits jobs as an array, and puts a job back into the queue when its time is up. What
came of a job is read from its run directory and from Slurm's controller, so that no accounting database is needed.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from foundry.config.errors import ConfigError, Violation
from foundry.config.launcher import GROUP, Slurm, launcher_of
from foundry.launch.launchers import FrozenLauncher, Job, Ledger, say
from foundry.launch.slurm_queue import QueuedJob, Unreachable, cancel, partitions, query
from foundry.launch.snapshot import snapshot
from foundry.records.status import read_status, write_status

SUBMITTED = "slurm.json"
"""In a run directory: the name that Slurm has given the job, and what it prints to."""

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 1.0, 15.0
_OURS = {"_target_", "submitit_folder", "detach", "snapshot_code", "max_num_timeout", "setup"}
# submitit's names that are not Slurm's alone.
_SHARED = {"name", "timeout_min", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb"}
_SHARED |= {"stderr_to_stdout"}
_ENDED = ("finished", "failed", "stopped")
_LOST = ("NODE_FAIL", "BOOT_FAIL", "COMPLETED", "PREEMPTED")


class SlurmLauncher(FrozenLauncher):
    """Submits jobs, and waits for them unless it is told to leave."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings that Hydra passes; each job's own, which may differ, are in its configuration."""
        super().__init__(**settings)
        self._checked: list[Slurm] = []

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Ask the cluster whether it takes such jobs.

        Raises:
            ConfigError: it does not, and why.
        """
        for config in configs:
            if (settings := _settings_of(config)) not in self._checked:
                check_partition(settings)
                self._checked.append(settings)

    def run(self, jobs: Sequence[Job]) -> None:
        """Submit the jobs that are not in the queue already, and wait for all.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the wait; whoever sits at a terminal is asked what becomes of the jobs.
        """
        self.check([job.composed for job in jobs])
        sweep_dir = Path(str(self._master.hydra.sweep.dir)).absolute()
        ids = _still_queued(jobs)
        for job in jobs:
            if job.number in ids:
                say(f"{job} is in the queue already, as {ids[job.number]}")
        ids |= _submit([job for job in jobs if job.number not in ids], sweep_dir)
        if _settings_of(self._master).detach:
            self._leave(ids, sweep_dir)
            return
        say(f"{len(ids)} jobs in the queue: {_listed(ids.values())}")
        watch = _Watch(jobs, ids)
        try:
            watch.run()
        except KeyboardInterrupt:
            if _is_to_cancel():
                cancel(ids.values())
                watch.run()
            else:
                self._leave(ids, sweep_dir)
            raise

    def _leave(self, ids: dict[int, str], sweep_dir: Path) -> None:
        self.detached = True
        say(f"{len(ids)} jobs go on by themselves: {_listed(ids.values())}")
        say(f"to watch them: python -m foundry.report dir={sweep_dir} watch=true")
        say(f"to end them: scancel {_listed(ids.values(), ' ')}")


def check_partition(settings: Slurm) -> None:
    """Look the partition up: Slurm lets a job wait for ever whose time limit is above the partition's.

    Raises:
        ConfigError: there is none such, its limit is lower, or Slurm is not here.
    """
    if shutil.which("sbatch") is None:
        message = "is slurm but there is no sbatch on this machine; submit from a login node, or choose local"
        raise ConfigError(Violation(GROUP, message))
    limits, default = partitions()
    wanted = settings.partition or default
    listed = f"partitions here: {', '.join(limits)}"
    if wanted is None:
        raise ConfigError(Violation("hydra.launcher.partition", f"has no value and the cluster no default; {listed}"))
    if unknown := [name for name in wanted.split(",") if name not in limits]:
        raise ConfigError(Violation("hydra.launcher.partition", f"is {unknown[0]}, which is not here; {listed}"))
    limit = max(limits[name] for name in wanted.split(","))
    if settings.timeout_min > limit:
        message = f"is {settings.timeout_min} but partition {wanted} allows {limit:g}; jobs go on after their limit"
        raise ConfigError(Violation("hydra.launcher.timeout_min", message))


def settle(run_dir: Path, job_id: str, found: QueuedJob | None) -> None:
    """Make status.json true of a job that has ended.

    Args:
        run_dir: the job's.
        job_id: Slurm's name of it.
        found: what Slurm says of it; None where it does not know it any more.
    """
    status = read_status(run_dir)
    if status.get("state") in _ENDED:
        if found is not None and found.state == "CANCELLED" and status["state"] == "stopped":
            write_status(run_dir, reason=f"{status.get('reason', '')}; {found}")
        return
    if found is None:
        # Of a task of an array that is cancelled before it starts, the controller keeps nothing.
        why = "was it cancelled while it waited?" if status.get("state") == "queued" else "it left no word"
        write_status(run_dir, state="lost", reason=f"Slurm does not know job {job_id} any more; {why}")
        return
    said = _last_words(run_dir)
    state = "lost" if found.state in _LOST else "failed"
    write_status(run_dir, state=state, reason=f"{found}{f'; it said last: {said}' if said else ''}")


class _Watch:
    """Waits for jobs, and says each change."""

    def __init__(self, jobs: Sequence[Job], ids: dict[int, str]) -> None:
        self._going = {job: ids[job.number] for job in jobs}
        self._ledger = Ledger(jobs)
        self._suspects: set[str] = set()
        self._interval = _FIRST_POLL_SECONDS
        self._complained = False

    def run(self) -> None:
        """Until every job has ended."""
        while self._going:
            time.sleep(self._interval)
            self._interval = min(1.1 * self._interval, _LAST_POLL_SECONDS)
            try:
                found = query(list(self._going.values()))
            except Unreachable as error:
                if not self._complained:
                    say(f"Slurm does not answer, the wait goes on: {error}")
                self._complained = True
                continue
            for job, job_id in list(self._going.items()):
                self._look_at(job, job_id, found.get(job_id))

    def _look_at(self, job: Job, job_id: str, found: QueuedJob | None) -> None:
        state = read_status(job.run_dir).get("state", "queued")
        if found is not None and not found.has_ended:
            self._suspects.discard(job_id)
            if found.is_waiting:
                self._ledger.note(job, "requeued" if state == "requeued" else "queued", found.reason)
            else:
                self._ledger.note(job, "running", found.nodes)
        elif state in _ENDED or job_id in self._suspects:
            settle(job.run_dir, job_id, found)
            self._ledger.settled(job)
            del self._going[job]
        else:  # a job that Slurm is about to put into the queue again has ended, too, for a moment
            self._suspects.add(job_id)
            self._interval = _FIRST_POLL_SECONDS


def _settings_of(config: DictConfig) -> Slurm:
    settings = launcher_of(config)
    assert isinstance(settings, Slurm)
    return settings


def _submit(jobs: Sequence[Job], sweep_dir: Path) -> dict[int, str]:
    """Submit jobs, those with the same settings as an array; returns what Slurm calls them, by number.

    Nothing is tried out with `sbatch --test-only`, which refuses what would only have to wait, as for a drained node.

    Raises:
        ConfigError: Slurm refuses them.
    """
    from submitit.core.utils import FailedSubmissionError, UncompletedJobError

    from foundry.launch.worker import SlurmTask

    groups: list[tuple[Slurm, list[Job]]] = []
    for job in jobs:
        settings = _settings_of(job.composed)
        group = next((group for known, group in groups if known == settings), None)
        if group is None:
            groups.append((settings, [job]))
        else:
            group.append(job)
    ids = {}
    for settings, group in groups:
        code = snapshot(sweep_dir) if settings.snapshot_code else None
        try:
            with _clean_environment():
                executor = _executor(settings, Path(settings.submitit_folder).absolute(), code)
                submitted = executor.map_array(SlurmTask(), [str(job.run_dir) for job in group])
        except (UncompletedJobError, FailedSubmissionError) as error:
            said = str(error).strip().splitlines()[-1]
            raise ConfigError(Violation("hydra.launcher", f"Slurm refuses such jobs: {said}")) from None
        for job, one in zip(group, submitted, strict=True):
            ids[job.number] = one.job_id
            note = {"job_id": one.job_id, "error_output": str(one.paths.stderr)}
            (job.run_dir / SUBMITTED).write_text(json.dumps(note) + "\n", encoding="utf-8")
    return ids


def _executor(settings: Slurm, folder: Path, code: Path | None) -> Any:
    """An executor of submitit; `code` is a folder to import from."""
    import submitit

    executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=settings.max_num_timeout)
    given = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name not in _OURS}
    # submitit passes an empty or absent option on as text.
    parameters = {name: value for name, value in given.items() if value is not None}
    executor.update_parameters(
        **{name if name in _SHARED else f"slurm_{name}": value for name, value in parameters.items()},
        slurm_setup=[*_environment_of_job(code), *(settings.setup or [])],
        # One rank that failed would leave the others waiting for it.
        slurm_srun_args=["--kill-on-bad-exit=1"],
    )
    return executor


def _environment_of_job(code: Path | None) -> list[str]:
    # Since Slurm 22.05 srun does not take over the cores that sbatch was asked for.
    lines = ["export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"]
    if code is not None:
        # Without the safe path, `python -m` would look into the working directory first.
        lines += [f"export PYTHONSAFEPATH=1 PYTHONPATH='{code}':$PYTHONPATH:'{Path.cwd()}'"]
    return lines


@contextmanager
def _clean_environment() -> Iterator[None]:
    """Hide what this process's own job, if it is one, has set; where Slurm is configured stays known."""
    from submitit.helpers import clean_env

    config = os.environ.get("SLURM_CONF")
    with clean_env():
        if config is not None:
            os.environ["SLURM_CONF"] = config
        yield


def _still_queued(jobs: Iterable[Job]) -> dict[int, str]:
    """Jobs that an earlier start of the sweep has submitted and that have not ended, with Slurm's names of them."""
    ids = {}
    for job in jobs:
        path = job.run_dir / SUBMITTED
        if path.is_file():
            ids[job.number] = str(json.loads(path.read_text(encoding="utf-8"))["job_id"])
    if not ids:
        return {}
    found = query(list(ids.values()))
    return {number: name for number, name in ids.items() if name in found and not found[name].has_ended}


def _last_words(run_dir: Path) -> str:
    """The last line that a job has printed to its error output, if any."""
    try:
        path = Path(json.loads((run_dir / SUBMITTED).read_text(encoding="utf-8"))["error_output"])
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip() and "slurmstepd" not in line), "")


def _is_to_cancel() -> bool:
    """Ask what becomes of the jobs; without a terminal, or on another Ctrl-C, they go on."""
    if not sys.stdin.isatty():
        return False
    say("\nCancel the jobs (c), or leave them to go on by themselves (any other key)?")
    try:
        return input().strip().lower().startswith("c")
    except (KeyboardInterrupt, EOFError):
        return False


def _listed(ids: Iterable[str], separator: str = ", ") -> str:
    """Slurm's names of jobs, an array once."""
    return separator.join(dict.fromkeys(job_id.partition("_")[0] for job_id in ids))
