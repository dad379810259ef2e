"""Builders of the budget, the schedule and the optimizers."""

import logging
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from foundry.config.build import build, check_methods, field_of
from foundry.config.lengths import check_lengths, resolve_budget
from foundry.config.schemas.evaluation import PatienceUnit
from foundry.config.schemas.hparams import ScheduleUnit
from foundry.config.schemas.optimizer import Muon
from foundry.config.schemas.root import Config
from foundry.config.schemas.scheduler import EvaluateAt, Scheduler
from foundry.core.duration import Budget
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Schedule
from foundry.data.splits import DataSplits
from foundry.optim.optimizers import find_coverage_problem
from foundry.optim.schedules import MomentumWarmup
from foundry.optim.schedules import Schedule as OwnSchedule
from foundry.parts.data import samples_per_epoch
from foundry.parts.fitting import fitting

log = logging.getLogger(__name__)


def build_budget(config: Config, data: DataSplits, dp_size: int) -> Budget:
    """Return the budget of the run; warn if it is too short for early stopping.

    Raises:
        ConfigError: a length in the settings does not fit the data or the run.
    """
    hparams, tokens = config.hparams, data.tokens_per_sample
    if hparams.batch_schedule is not None and hparams.batch_schedule_unit is ScheduleUnit.tokens and tokens is None:
        message = "is tokens but samples of this data have no tokens; set it to samples"
        raise ConfigError(Violation("hparams.batch_schedule_unit", message))
    try:
        epoch = samples_per_epoch(config.objective, data)
        budget = resolve_budget(hparams, samples_per_epoch=epoch, dp_size=dp_size, tokens_per_sample=tokens)
    except ValueError as error:
        # Thresholds in tokens are checked here, since the number of tokens per sample is known only with the data.
        raise ConfigError(Violation("hparams.batch_schedule", str(error))) from None
    if wrong := list(check_lengths(config, budget)):
        raise ConfigError(wrong)
    stopping, epochs = config.evaluation.early_stopping, budget.total_samples / budget.samples_per_epoch
    if stopping.patience is not None and stopping.unit is PatienceUnit.epochs and epochs <= stopping.patience:
        patience = f"evaluation.early_stopping.patience={stopping.patience} epochs"
        log.warning("%s is not shorter than the run, which has %.3g", patience, epochs)
    return budget


def build_schedule(config: Config, budget: Budget) -> Schedule:
    """Build the schedule of learning rate, weight decay and momentum.

    Logs a warning about settings that the schedule does not follow, and about a run whose only step has learning rate
    0.

    Raises:
        ConfigError: the schedule lacks a method of `Schedule`, or the optimizer has a momentum warm-up but the schedule
            is of another package.
    """
    own = constant_weight_decay(config.optimizer)
    start = getattr(config.scheduler, "start_weight_decay", None)
    end = getattr(config.scheduler, "end_weight_decay", None)
    if start is not None and own not in (start, end):
        log.warning("optimizer.weight_decay=%g is not used: scheduler sets it from %g to %g", own, start, end)
    if isinstance(config.scheduler, Scheduler) and (phases := config.scheduler.phases(budget)).is_clamped:
        steps = budget.batch_sizes.steps_at(phases.warmup)
        log.warning("scheduler.warmup=%s is longer than the run; using %g steps", config.scheduler.warmup, steps)
    schedule: Schedule = build(fitting(config.scheduler, "scheduler"), max_lr=config.hparams.lr, budget=budget)
    check_methods(schedule, Schedule, "scheduler._target_")
    if isinstance(config.optimizer, Muon):
        schedule = _with_momentum_warmup(schedule, config.optimizer, budget)
    if budget.total_steps == 1 and schedule.lr(0, budget.total_samples) == 0:
        is_at_start = getattr(config.scheduler, "evaluate_at", None) is EvaluateAt.start
        setting = "scheduler.evaluate_at=end" if is_at_start else "scheduler.min_lr above 0"
        message = "the only step of the run has learning rate 0, so no weights change"
        log.warning("scheduler: %s; train longer, such as hparams.max_steps=2, or set %s", message, setting)
    return schedule


def _with_momentum_warmup(schedule: Schedule, optimizer: Muon, budget: Budget) -> Schedule:
    start = optimizer.momentum_warmup_start
    if start is None:
        return schedule
    if not isinstance(schedule, OwnSchedule):
        message = f"is {start:g} but needs a schedule of foundry, not {type(schedule).__name__}; set it to null"
        raise ConfigError(Violation("optimizer.momentum_warmup_start", message))
    samples = optimizer.momentum_warmup_samples(budget, schedule.horizon)
    assert samples is not None, "the warm-up has a start value"
    return replace(schedule, momentum_warmup=MomentumWarmup(start=start, end=optimizer.momentum, samples=samples))


def build_optimizers(config: Config, model: nn.Module) -> list[Optimizer]:
    """Build optimizers that together cover each trainable parameter of the wrapped model once.

    Raises:
        ConfigError: a trainable parameter is in no optimizer or in two, or the result is not a list of optimizers.
    """
    offered = {"precision": config.precision.mode}
    optimizers = build(config.optimizer, optional=offered, model=model, lr=config.hparams.lr)
    if wrong := find_coverage_problem(optimizers, model):
        target = field_of(config.optimizer, "_target_")
        raise ConfigError(Violation("optimizer._target_", f"is {target}, which {wrong}"))
    return list(optimizers)


def constant_weight_decay(optimizer: Any) -> float:
    """Return the weight decay for a schedule that sets none: `weight_decay` of the optimizer's settings, or 0."""
    return float(field_of(optimizer, "weight_decay") or 0.0)
