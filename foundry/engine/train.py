"""Training of one run: process group, run directory, resume point, and error handling."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from foundry.checkpoint.finished import check_finished
from foundry.checkpoint.mirror.thread import Mirror
from foundry.checkpoint.resume_point import (
    ResumePoint,
    check_config,
    check_data,
    find_resume_point,
    is_longer,
    without_stop_reason,
)
from foundry.checkpoint.verification import together
from foundry.config.record.frozen import hash_config, plain, strict
from foundry.config.schemas.checkpoint import Checkpoint
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.core.events import Observer, RunEnded
from foundry.core.protocols import RunContext
from foundry.data.loader import explain_worker_deaths
from foundry.data.splits import DataSplits
from foundry.engine.agreement import on_all_ranks
from foundry.engine.assembly import build_trainer
from foundry.engine.directory import lock_run_dir
from foundry.engine.mirror import leave_out_incomplete, open_mirror
from foundry.engine.run_files import write_run_files
from foundry.generation.scoring import Judge
from foundry.parallel.determinism import deterministic
from foundry.parallel.gathering import broadcast
from foundry.parallel.malloc import keep_freed_memory
from foundry.parallel.precision import PrecisionPolicy, fp32_arithmetic
from foundry.parallel.process_group import Join, World, process_group
from foundry.parallel.watchdog import CollectiveError
from foundry.parts.data import build_data
from foundry.parts.judge import build_judge
from foundry.run_dir.ends import find_cause, is_consequence, record_if_dead
from foundry.run_dir.lock import RunDirectoryLostError, check_locked
from foundry.run_dir.result import find_result
from foundry.run_dir.status import read_status
from foundry.tracking.observers import build_observers
from foundry.training.memory_error import explain_memory_errors


@dataclass(frozen=True)
class RunResult:
    """Result of a run: `result` is the content of result.json, `metric` the value that a sweep compares."""

    run_dir: Path
    result: dict[str, Any]

    @property
    def metric(self) -> float | None:
        """Final value of the run's metric; None if `evaluation.metric` is not set."""
        return self.result.get("metric")


def train(
    config: Config,
    run_dir: Path,
    more_observers: Sequence[Observer] = (),
    *,
    join: Join | None = None,
    on_activity: Callable[[int, str], None] | None = None,
) -> RunResult:
    """Train as one rank of the run; resume if the run directory contains an unfinished run.

    Args:
        config: composed configuration, equal on all ranks.
        run_dir: output directory of rank 0; the other ranks use rank 0's value.
        more_observers: additional observers, notified after the configured ones, on rank 0.
        join: joins the ranks; None uses `join_ranks` of `foundry.parallel.process_group`.
        on_activity: called with the optimizer step and the name of each activity that begins, such as "training".

    Raises:
        ConfigError: a setting does not fit the data or the machine, or differs from the run to resume; a few of these
            errors are found only in training.
        NonFiniteError: the loss or gradient became NaN or infinite.
        Stopped: a signal was received; the run is saved unless checkpoints are off.
        RunDirectoryLostError: the run directory was deleted, moved or replaced.
    """
    config_hash = hash_config(config)
    with (
        deterministic(config.hparams.deterministic),
        fp32_arithmetic(tf32=config.precision.tf32),
        process_group(config.distributed, config.device.kind, join=join) as world,
        ExitStack() as stack,
    ):
        if world.device.type == "cpu":
            keep_freed_memory()
        world, run_dir, state = lock_run_dir(world, run_dir, config_hash, config.checkpoint, stack)
        mirror = open_mirror(config, config_hash, run_dir, world, stack)
        if mirror is not None:  # the run directory may have been restored
            state = broadcast(read_status(run_dir).get("state"), world)
        resume_point = find_resume_point(config.checkpoint.resume, run_dir, world)
        if mirror is not None:
            leave_out_incomplete(mirror, world)
        result = _find_result(run_dir, world) if state == "finished" else None
        config_now = strict(config)
        if result is not None and not is_longer(resume_point, config_now):
            _check_finished(config, config_hash, run_dir, resume_point, result, world)
            if mirror is not None:  # the copy may be incomplete, as after an outage at the end of the run
                mirror.start()
            return RunResult(run_dir, result)
        if resume_point is not None:
            check_config(resume_point, config, config_now, config.checkpoint.on_changed_config)
            if state == "finished":
                resume_point = without_stop_reason(resume_point)
        observers = [*build_observers(config.tracking, run_dir), *more_observers] if world.is_main else []
        with (
            _report_failure(observers, run_dir),
            _record_loss_of_rank_zero(run_dir, world),
            _refuse_exit(),
            explain_worker_deaths(),
            explain_memory_errors(world.device, world.rank),
        ):
            run = RunContext(
                config=config,
                config_hash=config_hash,
                data=_in_resumed_order(build_data(config), resume_point, config.data, config.checkpoint),
                judge=_build_judge(config.environment, stack),
                world=world,
                precision=PrecisionPolicy.from_config(config.precision, world.device),
                run_dir=run_dir,
                resume_point=resume_point,
                on_activity=on_activity,
            )
            return _train(run, observers, stack, mirror)


def _train(run: RunContext, observers: list[Observer], stack: ExitStack, mirror: Mirror | None) -> RunResult:
    """Build the trainer and train; rank 0 writes the run's files."""
    trainer, started = build_trainer(run, mirror)
    stack.callback(trainer.evaluation.close)
    if run.world.is_main:
        write_run_files(run.config, started.plan, run.data, run.run_dir)
    if run.world.leads_disk:
        trainer.check_run_dir = partial(check_locked, run.run_dir)
    trainer.observers = observers
    stack.callback(trainer.checkpoints.close)
    if mirror is not None:
        mirror.start()
    with trainer.watchdog, trainer.signals:
        result = trainer.fit(started)
    return RunResult(run.run_dir, result)


def _build_judge(environment: Any, stack: ExitStack) -> Judge | None:
    """Return the judge that scores completions; None without an environment. The judge is closed with the run."""
    judge = build_judge(environment)
    if judge is not None:
        stack.callback(judge.close)
    return judge


def _identity(config: Config) -> dict[str, str]:
    return build_data(config).identity()


def _in_resumed_order(
    data: DataSplits, resume_point: ResumePoint | None, settings: Any, checkpoint: Checkpoint
) -> DataSplits:
    """Return the data in the order of the resumed run; `settings` are the data's settings."""
    if resume_point is None:
        return data
    identity = data.identity()
    order = check_data(resume_point, identity, plain(settings), checkpoint.on_changed_config)
    return replace(data, content=identity["content"], fingerprint=order)


def _find_result(run_dir: Path, world: World) -> dict[str, Any] | None:
    """Return the recorded result of a finished run, on every rank; None if it is missing or damaged."""
    if world.disks is None:
        return find_result(run_dir)
    return together(lambda: find_result(run_dir) if world.is_main else None, world)[0]


def _check_finished(
    config: Config, config_hash: str, run_dir: Path, resume_point: ResumePoint | None, result: Any, world: World
) -> None:
    """Check that the settings would give the result of the finished run; only rank 0 has its files for sure.

    Raises:
        ConfigError: as in `check_finished`, on every rank.
    """

    def check() -> None:
        if world.is_main or world.disks is None:
            identity = partial(_identity, config)
            check_finished(config, strict(config), config_hash, run_dir, resume_point, result, identity)

    if world.disks is None:
        check()
    else:
        on_all_ranks(check, world, lambda error: Violation("hydra.run.dir", f"is {run_dir}: {error}; correct that"))


@contextmanager
def _record_loss_of_rank_zero(run_dir: Path, world: World) -> Iterator[None]:
    """Record the run as failed if a collective fails and rank 0, which normally records failures, is dead."""
    try:
        yield
    except CollectiveError as error:
        if not world.is_main:
            record_if_dead(run_dir, f"rank 0 has ended, perhaps killed; {error}")
        raise


@contextmanager
def _refuse_exit() -> Iterator[None]:
    """Convert the exception of `sys.exit(0)` in a part, which would otherwise end the run as if it had finished.

    Raises:
        RuntimeError: a part has called `sys.exit(0)`.
    """
    try:
        yield
    except SystemExit as error:
        if error.code not in (0, None):
            raise
        raise RuntimeError("sys.exit(0) was called before the end of the run; raise an exception instead") from error


@contextmanager
def _report_failure(observers: Sequence[Observer], run_dir: Path) -> Iterator[None]:
    """Notify the observers if the body failed or Ctrl-C interrupted it, except after a ConfigError or SystemExit.

    Raises:
        RunDirectoryLostError: the run directory was replaced, so observers must not write to it.
    """
    try:
        yield
    except (ConfigError, RunDirectoryLostError):
        raise
    except SystemExit:  # Stopped is a subclass, and submitit raises SystemExit after requeueing a job
        raise
    except BaseException as error:
        if observers:
            check_locked(run_dir)
        if isinstance(error, KeyboardInterrupt):
            event = RunEnded(state="stopped", reason="interrupted", result={})
        else:
            reason = format_reason(error)
            if is_consequence(type(error).__name__, reason):
                reason = find_cause() or reason
            event = RunEnded(state="failed", reason=reason, result={})
        for observer in observers:
            observer.on_end(event)
        raise
