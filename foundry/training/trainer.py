"""The trainer: order of events of a run."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from foundry.core.duration import Budget, EpochInterval, Interval
from foundry.core.ema import WeightAverage
from foundry.core.errors import ConfigError
from foundry.core.events import Evaluated, Observer, RunEnded, RunStarted, StepLogged
from foundry.core.progress import Progress
from foundry.core.protocols import (
    CheckpointManager,
    SaveError,
    Schedule,
    StopRule,
    Window,
    WindowSource,
    scheduled_momentum,
)
from foundry.core.state_values import read_optional_number
from foundry.core.stop_signals import Stopped
from foundry.parallel.process_group import World
from foundry.parallel.rank_flags import RankFlags
from foundry.parallel.watchdog import Watchdog, translate
from foundry.training.best import Best
from foundry.training.collection import CollectedBetweenSteps
from foundry.training.compiling import Recompilations
from foundry.training.evaluation import Evaluation
from foundry.training.guards import LossSpike
from foundry.training.memory_error import OutOfMemoryError, is_out_of_memory
from foundry.training.metric_sums import read_means
from foundry.training.pause import Pause
from foundry.training.profiling import StepProfiler
from foundry.training.signals import Boundary, SignalHandler
from foundry.training.step import StepResult, TrainStep
from foundry.training.throughput import Throughput

log = logging.getLogger(__name__)

CHECKING = "checking the first step"
"""Name of the activity during `check_first_step`."""

_TIME_IS_UP = "hparams.max_minutes is reached"


@dataclass(frozen=True)
class _Measurement:
    """Result of an evaluation; `metrics` is None without an evaluation."""

    metrics: dict[str, float] | None = None
    is_best: bool = False
    stop_reason: str | None = None


@dataclass(kw_only=True)
class Trainer:
    """Takes optimizer steps until the budget is used up or the run is stopped, and notifies observers of its events.

    Attributes:
        step: the optimizer step.
        source: source of windows of microbatches.
        schedule: learning rate, weight decay and momentum of each update.
        constant_weight_decay: weight decay of the optimizer, logged if the schedule does not set it.
        progress: counters of steps, samples and tokens.
        budget: length of the run.
        max_seconds: wall-clock limit of training across restarts; None for no limit.
        world: process group of the run.
        throughput: measures throughput between logged steps.
        watchdog: ends this process if it makes no progress within the timeout.
        observers: receivers of the run's events; empty on ranks above 0.
        log_every_n_steps: optimizer steps between logged ones; the first and the last are always logged.
        evaluation_interval: interval between evaluations; None evaluates only at the end.
        evaluation: evaluates the model.
        metric: name of the run's main metric in metrics.jsonl; None if not set.
        stop_rules: rules by name, all updated after each evaluation; the first one with a reason to stop ends the run.
        best: the best evaluation so far.
        checkpoints: saves checkpoints and restores the last one.
        rank_flags: exchanges flags between ranks at step boundaries.
        signals: records signals.
        ema: averaged weights, which are used for evaluation; None if not kept.
        max_rollbacks: maximum number of rollbacks to the same checkpoint.
        save_final: whether to save a checkpoint at the end of the run, even if the last evaluation is not the best.
        explain_out_of_memory: returns a message about memory use, given torch's error and the moment, such as "in step
            3".
        profiler: records selected steps; None disables profiling.
        recompilations: warns of graphs that are compiled after the first steps.
        pause: rung of a search where the run pauses; None if it runs to its end.
        check_first_step: called before this process takes its first step; leaves all state unchanged. None disables the
            check.
        check_run_dir: called before each write into the run directory; on rank 0, raises if the directory is lost.
    """

    step: TrainStep
    source: WindowSource
    schedule: Schedule
    constant_weight_decay: float
    progress: Progress
    budget: Budget
    max_seconds: float | None
    world: World
    throughput: Throughput
    watchdog: Watchdog
    log_every_n_steps: int
    evaluation_interval: Interval | EpochInterval | None
    evaluation: Evaluation
    metric: str | None
    stop_rules: Mapping[str, StopRule]
    best: Best
    checkpoints: CheckpointManager
    rank_flags: RankFlags
    signals: SignalHandler
    ema: WeightAverage | None
    max_rollbacks: int
    save_final: bool
    explain_out_of_memory: Callable[[BaseException, str], str]
    profiler: StepProfiler | None
    recompilations: Recompilations
    pause: Pause | None = None
    check_first_step: Callable[[], None] | None = None
    check_run_dir: Callable[[], None] = lambda: None
    observers: Sequence[Observer] = ()
    _loss: float | None = None
    _stop_reason: str | None = None
    _rollbacks: int = 0
    _rolled_back_to: int = -1
    _now: str = "starting"
    _seconds_before: float = 0.0
    _start_time: float = field(default_factory=time.monotonic)

    def fit(self, started: RunStarted) -> dict[str, Any]:
        """Train from the current progress until the budget is used up, a stop rule fires or the time limit is reached.

        A run also ends at its rung, in state "paused": another start continues it with the next rung.

        Returns:
            The content of result.json.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite, more often in a row than the guard allows.
            OutOfMemoryError: the device or the host ran out of memory.
            LossSpike: the loss jumped again after `max_rollbacks` rollbacks to a checkpoint, or there is no checkpoint.
            SaveError: the last checkpoint of the complete run could not be written, or an earlier one with
                `checkpoint.strict_saves`.
            Stopped: a signal stopped the run, after an attempt to save it.
            RunDirectoryLostError: the run directory was deleted, moved or replaced.
        """
        self._notify("on_start", started)
        self._start_time = time.monotonic()
        if self._has_steps(self._stop_reason) and self.check_first_step is not None:
            self._set_activity(CHECKING)
            with self._explain_errors():
                self.check_first_step()
        self.throughput.start(self.progress.steps, self.progress.samples, self.progress.tokens)
        last = _Measurement(stop_reason=self._stop_reason)
        with self._explain_errors(), CollectedBetweenSteps() as garbage:
            while self._has_steps(last.stop_reason):
                try:
                    with nullcontext() if self.profiler is None else self.profiler.around(self.progress.steps + 1):
                        last = self._advance()
                except LossSpike as spike:
                    self._roll_back(spike)
                garbage.after_step(self.progress.steps)
            if self.profiler is not None:
                self.profiler.stop()
            pause = self.pause if self._is_at_rung(last.stop_reason) else None
            last = self._save_end(last) if pause is None else self._save_pause(last)
            self.checkpoints.finish()
        return self._report_end(started, last, pause)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, except tensors and RNG states, as JSON, equal on all ranks."""
        return {
            "progress": self.progress.state_dict(),
            "source": self.source.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "stop_rules": {name: rule.state_dict() for name, rule in self.stop_rules.items()},
            "best": self.best.state_dict(),
            "stop_reason": self._stop_reason,
            **({} if self.max_seconds is None else {"seconds": self._seconds()}),
            "loss": self._loss if self._loss is not None and math.isfinite(self._loss) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, except the schedule, which the caller handles."""
        self.progress.load_state_dict(state["progress"])
        self.source.load_state_dict(state["source"])
        self.step.load_state_dict(state["step"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        # In checkpoints from before stop rules had names, early stopping is the only rule with state.
        states = state["stop_rules"] if "stop_rules" in state else {"early_stopping": state["early_stopping"]}
        for name, rule in self.stop_rules.items():
            if name in states:
                rule.load_state_dict(states[name])
        self.best.load_state_dict(state["best"])
        self._loss, self._stop_reason = read_optional_number(state, "loss"), state["stop_reason"]
        self._seconds_before = read_optional_number({"seconds": 0.0, **state}, "seconds") or 0.0

    def _has_steps(self, stop_reason: str | None) -> bool:
        """Return whether to take another step in this start of the run."""
        has_budget = self.progress.steps < self.budget.total_steps and stop_reason is None
        return has_budget and not self._is_at_rung(stop_reason)

    def _is_at_rung(self, stop_reason: str | None) -> bool:
        """Return whether the run pauses now; a run that has ended anyway does not pause."""
        has_ended = self.progress.steps >= self.budget.total_steps or stop_reason is not None
        return self.pause is not None and not has_ended and self.pause.is_reached(self.progress)

    def _save_end(self, last: _Measurement) -> _Measurement:
        """Return the last evaluation of the run, and save the run if the settings require a checkpoint of its end."""
        if last.metrics is None:  # resumed after the last step: only the final evaluation and save are left
            last = replace(self._measure(self.progress.samples), stop_reason=last.stop_reason)
        if self.save_final or last.is_best:
            self._save(last, wait=True)
        return last

    def _save_pause(self, last: _Measurement) -> _Measurement:
        """Save the run at its rung; then evaluate it, unless the last step did.

        An evaluation that is not due by the interval has no effect on the run: the checkpoint is saved before it, and
        the best evaluation and the stop rules do not see it. So the run continues as if it had not paused.
        """
        self._save(last, wait=True)
        return last if last.metrics is not None else _Measurement(self._evaluate())

    def _report_end(self, started: RunStarted, last: _Measurement, pause: Pause | None) -> dict[str, Any]:
        """Notify observers of the end of the run or of its pause, and return the content of result.json."""
        metrics = last.metrics or {}
        state, reason = "finished", last.stop_reason or ""
        if pause is not None:
            state, reason = "paused", pause.reason(self.progress.steps, metrics)
        result = {
            "status": state,
            "step": self.progress.steps,
            "samples": self.progress.samples,
            "tokens": self.progress.tokens,
            "loss": self._loss,
            **metrics,
            "best": self.best.result(),
            "config_hash": started.config_hash,
            "metric": None if self.metric is None else metrics.get(self.metric),
            **({} if pause is None else {"rung": pause.rung}),
        }
        for rule in self.stop_rules.values():
            result |= rule.result()
        self._notify("on_end", RunEnded(state=state, reason=reason, result=result))
        return result

    def _advance(self) -> "_Measurement":
        """Take one optimizer step, then log, evaluate and save a checkpoint if due."""
        progress = self.progress
        self._set_activity("reading samples")
        window = self.source.next_window()
        self._set_activity("training")
        samples_before, samples_after = progress.samples, progress.samples + window.num_samples
        tokens = (
            None if window.num_tokens is None else (progress.tokens or 0, (progress.tokens or 0) + window.num_tokens)
        )
        lr = self.schedule.lr(samples_before, samples_after)
        weight_decay = self.schedule.weight_decay(samples_before, samples_after)
        momentum = scheduled_momentum(self.schedule, samples_before, samples_after)
        with self.recompilations.around_step():
            result = self.step(window, lr, progress.steps + 1, weight_decay=weight_decay, momentum=momentum)
        self.watchdog.started()
        self.checkpoints.check_state()
        progress.advance(window.num_samples, window.num_tokens)
        if self.ema is not None:
            self.ema.update(result.skipped)
        done = progress.steps >= self.budget.total_steps
        if done or progress.steps == 1 or progress.steps % self.log_every_n_steps == 0:
            decay = self.constant_weight_decay if weight_decay is None else weight_decay
            self._log(result, lr, decay, window)
        measurement, interval = _Measurement(), self.evaluation_interval
        if done or (interval is not None and interval.due(progress.steps, samples_before, samples_after, tokens)):
            measurement = self._measure(samples_before)
        if not done and measurement.stop_reason is None:
            return self._keep(
                self.checkpoints.is_due(progress.steps, samples_before, samples_after, tokens),
                measurement,
                samples_before,
            )
        return measurement

    def _measure(self, samples_before: int) -> "_Measurement":
        """Evaluate, update the best evaluation, and check the stop rules."""
        metrics = self._evaluate()
        is_best = self.best.update(metrics, self.progress.steps)
        epoch = samples_before // self.progress.samples_per_epoch
        share = self.progress.samples / self.budget.total_samples
        reasons = [rule.update(metrics, epoch, share) for rule in self.stop_rules.values()]
        self._stop_reason = next((reason for reason in reasons if reason is not None), None)
        return _Measurement(metrics, is_best, self._stop_reason)

    def _keep(self, is_due: bool, measurement: "_Measurement", samples_before: int) -> "_Measurement":
        """Save a checkpoint if due, stop after a signal, or end at the time limit; all ranks decide the same."""
        flags = int(self.signals.flags)
        if self.checkpoints.is_time():
            flags |= Boundary.SAVE
        if self.max_seconds is not None and self.world.is_main and self._seconds() >= self.max_seconds:
            flags |= Boundary.TIME
        common_flags = self.rank_flags.exchange(flags)  # an int, since operators of IntFlag take microseconds
        if common_flags and (signum := Boundary(common_flags).signum) is not None:
            self._stop(signum, measurement)
        if common_flags & Boundary.TIME:
            measurement = measurement if measurement.metrics is not None else self._measure(samples_before)
            self._stop_reason = measurement.stop_reason or _TIME_IS_UP
            return replace(measurement, stop_reason=self._stop_reason)
        if is_due or measurement.is_best or common_flags & Boundary.SAVE:
            self._save(measurement, wait=False)
        return measurement

    def _seconds(self) -> float:
        """Return the seconds of training, including earlier starts of the run."""
        return self._seconds_before + time.monotonic() - self._start_time

    def _save(self, measurement: "_Measurement", *, wait: bool) -> Path | None:
        self._set_activity("saving a checkpoint")
        self.check_run_dir()
        self.step.guard.check()
        metric = (measurement.metrics or {}).get(self.metric or "")
        with self.throughput.pause():
            return self.checkpoints.save(
                self.progress,
                self.state_dict(),
                self.source.tensors(),
                metric=metric,
                is_best=measurement.is_best,
                wait=wait,
            )

    def _stop(self, signum: Signals, measurement: "_Measurement") -> NoReturn:
        """Save, notify observers, request a requeue if supported, and exit; a failed save does not prevent the exit."""
        reason = signum.name
        try:
            checkpoint = self._save(measurement, wait=True)
            self.checkpoints.finish()
        except SaveError as error:  # a requeued run resumes from an earlier checkpoint
            checkpoint, reason = None, f"{signum.name}; {error}"
        state = self.signals.state_after(signum) if self.world.is_main else "stopped"
        self._notify("on_end", RunEnded(state=state, reason=reason, result={}))
        self.signals.hand_over(signum, is_main=self.world.is_main)
        raise Stopped(signum, self.progress.steps, checkpoint, state)

    def _roll_back(self, spike: LossSpike) -> None:
        """Go back to the last checkpoint, and continue with the data after the spike.

        Raises:
            LossSpike: there is no checkpoint, or the run went back to this one `max_rollbacks` times already.
        """
        self._set_activity("rolling back to the last checkpoint")
        state = self.checkpoints.roll_back()
        if state is None:
            log.error("%s; there is no checkpoint to roll back to", spike)
            raise spike
        position, tensors, seconds = self.source.state_dict(), self.source.tensors(), self._seconds()
        self.load_state_dict(state)
        self._seconds_before, self._start_time = seconds, time.monotonic()
        self.source.load_state_dict(position)
        self.source.load_tensors(tensors)
        self.source.rewind(self.progress.samples)
        step = self.progress.steps
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_back_to else 1
        self._rolled_back_to = step
        if self._rollbacks > self.max_rollbacks:
            log.error("%s; rolling back to step %d %d times did not help", spike, step, self.max_rollbacks)
            raise spike
        self.throughput.start(step, self.progress.samples, self.progress.tokens)
        if self.world.is_main:
            log.warning("%s; rolled back to step %d, skipping its data", spike, step)

    def _log(self, result: StepResult, lr: float, weight_decay: float, window: Window) -> None:
        # The trainer reads the results of a step only here, because reading them waits for the device.
        self._set_activity("waiting for the device")
        metrics, (loss, grad_norm) = read_means(result.metrics, result.loss, result.grad_norm)
        self._loss = loss
        self.step.guard.check()
        rates = self.throughput.log(self.progress.steps, self.progress.samples, self.progress.tokens)
        if self.world.is_main:
            self.recompilations.warn()
        norms = {} if result.norms is None else result.norms.read()
        self._notify(
            "on_step",
            StepLogged(
                step=self.progress.steps,
                samples=self.progress.samples,
                tokens=self.progress.tokens,
                epoch=self.progress.epoch,
                loss=loss,
                lr=lr,
                weight_decay=weight_decay,
                grad_norm=grad_norm,
                global_batch_size=window.num_samples,
                metrics={**metrics, **window.metrics, **norms},
                **asdict(rates),
            ),
        )

    def _evaluate(self) -> dict[str, float]:
        """Evaluate with the averaged weights if they are kept; called by all ranks.

        Returns:
            Metrics by their names in metrics.jsonl.
        """
        self._set_activity("evaluating")
        self.check_run_dir()
        with self.throughput.pause(), nullcontext() if self.ema is None else self.ema.swapped_in():
            metrics, files = self.evaluation.measure(self.progress.steps, self._set_activity)
        event = Evaluated(
            step=self.progress.steps,
            samples=self.progress.samples,
            metrics=metrics,
            samples_file=next(iter(files), None),
        )
        self._notify("on_evaluation", event)
        return metrics

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Add context to errors: rank, step and activity if a collective failed, memory use if memory ran out."""
        try:
            yield
        except ConfigError as error:  # the run has begun, so its end is reported to observers
            self._notify("on_end", RunEnded(state="failed", reason=str(error), result={}))
            raise
        except Exception as error:
            if is_out_of_memory(error):
                in_check = "before the first step, in the check with the longest sample (hparams.check_first_step),"
                moment = in_check if self._now == CHECKING else f"in step {self.progress.steps + 1}"
                raise OutOfMemoryError(self.explain_out_of_memory(error, moment)) from error
            translated = translate(
                error,
                rank=self.world.rank,
                step=self.progress.steps,
                activity=self._now,
                known_cause=self.watchdog.silent_ranks_message,
            )
            if translated is None:
                raise
            raise translated from error

    def _set_activity(self, activity: str) -> None:
        self._now = activity
        self.watchdog.heartbeat(self.progress.steps + 1, activity)

    def _notify(self, name: str, event: object) -> None:
        self.check_run_dir()
        for observer in self.observers:
            getattr(observer, name)(event)
