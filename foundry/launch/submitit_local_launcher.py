"""`hydra/launcher=submitit_local` of hydra-submitit-launcher: the jobs of a sweep on this machine, run by submitit.

submitit starts all jobs at once, and the tasks of a job as ranks that train together. submitit signals a job 30 seconds
before its time limit, and starts the job again; the run resumes from its checkpoint.

As with the plugin's launcher, jobs continue if this process is killed. Signals to this process are forwarded: jobs save
and stop.
"""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from foundry.config.environment import default_variables, visible_gpus
from foundry.config.schemas.launcher import SubmititLocal, resolve_launcher
from foundry.core.errors import ConfigError, Violation
from foundry.core.safe_path import VARIABLE
from foundry.launch.launchers import ComposedJob, FrozenLauncher, Ledger, say
from foundry.launch.local import block_interrupts, collect_signals, signal_exception
from foundry.launch.slurm_submission import clean_environment
from foundry.launch.slurm_task import SlurmTask
from foundry.run_dir.files import read_tail
from foundry.run_dir.lock import is_held
from foundry.run_dir.status import ENDED, read_status, write_status

_POLL_SECONDS = 0.2
_REPEAT_SECONDS = 2.0
"""Interval for repeating SIGTERM, which submitit ignores until a run has installed its handler."""
_GPUS = "hydra.launcher.gpus_per_node"
_REMEDY = "choose hydra/launcher=local"


class SubmititLocalLauncher(FrozenLauncher):
    """Launcher that runs jobs with submitit's executor for one machine, and waits for them."""

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Check that each job sees this machine's GPUs and does not share them.

        Raises:
            ConfigError: a job would not see its GPUs, or would share them; the message is about the first one.
        """
        gpus = visible_gpus()
        for config in configs:
            num_gpus = _resolve_settings(config).gpus_per_node
            if num_gpus is None and gpus:
                message = "has no value, so submitit would hide this machine's GPUs; set one for each process of a"
                raise ConfigError(Violation(_GPUS, f"{message} job, 0 for the CPU, or {_REMEDY}"))
            if num_gpus and num_gpus > len(gpus):
                raise ConfigError(Violation(_GPUS, f"is {num_gpus} but the number of visible GPUs is {len(gpus)}"))
            if num_gpus and not all(name.isdecimal() for name in gpus):
                message = f"is {num_gpus} but submitit needs CUDA_VISIBLE_DEVICES as numbers, not {gpus[0]}; {_REMEDY}"
                raise ConfigError(Violation(_GPUS, message))
            at_a_time = config.hydra.sweeper.get("max_batch_size") or len(configs)
            if num_gpus and min(at_a_time, len(configs)) > 1:
                message = f"is {num_gpus} but submitit starts all jobs at once, on the same GPUs"
                remedy = f"add hydra.sweeper.max_batch_size=1, or {_REMEDY}"
                raise ConfigError(Violation(_GPUS, f"{message}; {remedy}"))

    def run(self, jobs: Sequence[ComposedJob]) -> None:
        """Run the jobs until all have ended, or a signal arrives: then each job saves and stops.

        Raises:
            KeyboardInterrupt: Ctrl-C arrived; a second Ctrl-C ended the wait.
            SystemExit: another signal arrived; the code is 128 + its number.
        """
        with collect_signals() as signals:
            _Watch(self.work, jobs, signals).run()
        if signals:
            say(f"the same command with hydra.sweep.dir={self._master.hydra.sweep.dir} resumes from there")
            raise signal_exception(signals[0])


class _Watch:
    """Running jobs, each with the submitit process that controls its tasks."""

    def __init__(
        self, work: Callable[[Path], int], jobs: Sequence[ComposedJob], signals: Sequence[signal.Signals]
    ) -> None:
        self._signals = signals
        self._ledger = Ledger(jobs)
        self._running = dict[ComposedJob, Any]()
        self._next_signal = 0.0
        for job in jobs:
            if is_held(job.run_dir):
                self._ledger.note(job, "running", "in another process; this process does not wait for it")
            elif not signals:
                self._running[job] = _start(work, job)
                self._ledger.note(job, "running")

    def run(self) -> None:
        """Wait until every job has ended, or a second Ctrl-C arrives."""
        while self._running and list(self._signals).count(signal.SIGINT) < 2:
            time.sleep(_POLL_SECONDS)
            if self._signals and time.monotonic() >= self._next_signal:
                self._stop()
            for job, submitted in list(self._running.items()):
                if submitted.done():
                    self._settle(job, submitted.paths.stderr)
                    del self._running[job]

    def _stop(self) -> None:
        """Ask the tasks of all jobs to save and stop."""
        if not self._next_signal:
            text = f"{len(self._running)} running (saving and stopping); a second Ctrl-C does not wait for them"
            say(f"{self._signals[0].name}: {text}")
        self._next_signal = time.monotonic() + _REPEAT_SECONDS
        for submitted in self._running.values():
            submitted._process.terminate()

    def _settle(self, job: ComposedJob, error_output: Path) -> None:
        """Record the end of a job, after its last attempt."""
        state = read_status(job.run_dir).get("state")
        if self._signals and state not in ("finished", "failed"):
            write_status(job.run_dir, state="stopped", reason=self._signals[0].name)
        elif state == "requeued":
            reason = "its time limit was reached as often as submitit allows; the same command resumes it"
            write_status(job.run_dir, state="stopped", reason=reason)
        elif state not in ENDED:
            lines = [line.strip() for line in read_tail(error_output).splitlines() if line.strip()]
            last = f"; last output: {lines[-1]}" if lines else ""
            write_status(job.run_dir, state="lost", reason=f"its processes ended without recording a reason{last}")
        self._ledger.note_end(job)


def _start(work: Callable[[Path], int], job: ComposedJob) -> Any:
    """Start a job with submitit, and return the `submitit.Job`."""
    from submitit import LocalExecutor

    settings = _resolve_settings(job.config)
    executor = LocalExecutor(folder=Path(settings.submitit_folder).absolute())
    executor.update_parameters(
        timeout_min=settings.timeout_min,
        tasks_per_node=settings.tasks_per_node,
        gpus_per_node=settings.gpus_per_node or 0,
        visible_gpus=[int(name) for name in visible_gpus() if name.isdecimal()] if settings.gpus_per_node else (),
        stderr_to_stdout=settings.stderr_to_stdout,
    )
    variables = {VARIABLE: "1"}
    if settings.cpus_per_task is not None:
        variables["OMP_NUM_THREADS"] = str(settings.cpus_per_task)
    # Ctrl-C must reach only this process, which then terminates the jobs itself.
    with block_interrupts(), clean_environment(), default_variables(variables):
        return executor.submit(SlurmTask(work), str(job.run_dir))


def _resolve_settings(config: DictConfig) -> SubmititLocal:
    settings = resolve_launcher(config)
    assert isinstance(settings, SubmititLocal)
    return settings
