"""The order of events of a run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foundry.config.duration import Budget, Interval
from foundry.parallel.process_group import World
from foundry.parallel.watchdog import Watchdog, translate
from foundry.training.ema import WeightAverage
from foundry.training.evaluation import Evaluator
from foundry.training.events import Evaluated, Observer, RunEnded, RunStarted, StepLogged
from foundry.training.progress import Progress
from foundry.training.protocols import Schedule, WindowSource
from foundry.training.step import StepResult, TrainStep
from foundry.training.throughput import Throughput


@dataclass(kw_only=True)
class Trainer:
    """Takes optimizer steps until the budget is spent, and tells observers at step boundaries.

    Attributes:
        step: the optimizer step.
        source: where windows of microbatches come from.
        schedule: learning rate and weight decay of each update.
        constant_weight_decay: what to log where the schedule has no weight decay: the optimizer's own.
        progress: the clock.
        budget: when the run ends.
        world: this rank and the others.
        throughput: measures speed between logged steps.
        watchdog: ends a process that waits too long for the others.
        observers: told of events; none on ranks above 0.
        log_every_n_steps: optimizer steps between logged ones; the first and the last are always logged.
        evaluation_interval: between evaluations; None: only at the end.
        evaluator: measures the model on held-out data and draws samples.
        save: writes a checkpoint; None: nothing is saved.
        ema: averaged weights, which are those evaluated, where kept.
    """

    step: TrainStep
    source: WindowSource
    schedule: Schedule
    constant_weight_decay: float
    progress: Progress
    budget: Budget
    world: World
    throughput: Throughput
    watchdog: Watchdog
    log_every_n_steps: int
    evaluation_interval: Interval | None
    evaluator: Evaluator
    save: Callable[[Progress], Path] | None
    ema: WeightAverage | None
    observers: Sequence[Observer] = ()
    _best: dict[str, float] = field(default_factory=dict)
    _now: str = "starting"

    def fit(self, started: RunStarted) -> dict[str, Any]:
        """Run to the end of the budget.

        Returns:
            What result.json holds.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite.
        """
        self._tell("on_start", started)
        self.throughput.start()
        last: StepResult | None = None
        evaluation: dict[str, float] = {}
        with self._collectives_explained():
            while self.progress.steps < self.budget.total_steps:
                last, evaluation = self._advance()
            self.step.guard.check()
            if self.save is not None:
                self._doing("saving a checkpoint")
                self.save(self.progress)
        result = {
            "status": "finished",
            "step": self.progress.steps,
            "samples": self.progress.samples,
            "tokens": self.progress.tokens,
            "loss": None if last is None else last.loss.item(),
            "val_loss": evaluation.get("loss"),
            "best": self._best or None,
            "config_hash": started.config_hash,
            "metric": evaluation.get("loss"),
        }
        self._tell("on_end", RunEnded(state="finished", reason="", result=result))
        return result

    def _advance(self) -> tuple[StepResult, dict[str, float]]:
        """One optimizer step and what is due at its boundary; the evaluation is empty where none was."""
        progress = self.progress
        self._doing("training")
        window = self.source.next_window()
        before, after = progress.samples, progress.samples + window.num_samples
        lr, weight_decay = self.schedule.lr(before, after), self.schedule.weight_decay(before, after)
        result = self.step(window, lr, progress.steps + 1, weight_decay=weight_decay)
        progress.advance(window.num_samples)
        if self.ema is not None:
            self.ema.update()
        done = progress.steps >= self.budget.total_steps
        if done or progress.steps == 1 or progress.steps % self.log_every_n_steps == 0:
            decay = self.constant_weight_decay if weight_decay is None else weight_decay
            self._log(result, lr, decay, window.num_samples)
        due = self.evaluation_interval is not None and self.evaluation_interval.due(progress.steps, before, after)
        if done or due:
            return result, self._evaluate()
        return result, {}

    def _log(self, result: StepResult, lr: float, weight_decay: float, global_batch_size: int) -> None:
        loss = result.loss.item()  # the only place where the host waits for the device
        self.step.guard.check()
        rates = self.throughput.log(self.progress.steps, self.progress.samples)
        self._tell(
            "on_step",
            StepLogged(
                step=self.progress.steps,
                samples=self.progress.samples,
                tokens=self.progress.tokens,
                epoch=self.progress.epoch,
                loss=loss,
                lr=lr,
                weight_decay=weight_decay,
                grad_norm=result.grad_norm.item(),
                global_batch_size=global_batch_size,
                metrics={name: value.item() for name, value in result.metrics.items()},
                **asdict(rates),
            ),
        )

    def _evaluate(self) -> dict[str, float]:
        """Measure and draw with the averaged weights, where kept; ranks do it together."""
        self._doing("evaluating")
        with self.throughput.pause():
            if self.ema is None:
                metrics, file = self._measure_and_draw()
            else:
                with self.ema.swapped_in():
                    metrics, file = self._measure_and_draw()
        loss = metrics["loss"]
        if not self._best or loss < self._best["val_loss"]:
            self._best = {"step": self.progress.steps, "val_loss": loss}
        rest = {name: value for name, value in metrics.items() if name != "loss"}
        event = Evaluated(
            step=self.progress.steps, samples=self.progress.samples, val_loss=loss, metrics=rest, samples_file=file
        )
        self._tell("on_evaluation", event)
        return metrics

    def _measure_and_draw(self) -> tuple[dict[str, float], Path | None]:
        metrics = self.evaluator.measure(lambda: self._doing("evaluating"))
        self._doing("drawing samples")
        return metrics, self.evaluator.draw(self.progress.steps)

    @contextmanager
    def _collectives_explained(self) -> Iterator[None]:
        """A collective that failed names this rank, the step and what it was doing."""
        try:
            yield
        except Exception as error:
            explained = translate(error, rank=self.world.rank, step=self.progress.steps, doing=self._now)
            if explained is None:
                raise
            raise explained from error

    def _doing(self, what: str) -> None:
        self._now = what
        self.watchdog.beat(self.progress.steps + 1, what)

    def _tell(self, name: str, event: object) -> None:
        for observer in self.observers:
            getattr(observer, name)(event)
