"""The content of plan.json: numbers derived from the configuration, its data and the number of ranks."""

import math
from collections.abc import Iterable, Iterator
from pkgutil import resolve_name
from typing import Any

from torch import nn

from foundry.config.schemas.root import Config
from foundry.config.schemas.scheduler import EvaluateAt, Scheduler
from foundry.core.duration import Budget, EpochInterval, Interval, without_rounding_error
from foundry.core.events import Phase, PlannedUpdate
from foundry.core.protocols import HasPhases, Schedule
from foundry.core.tasks import planned
from foundry.data.packing import first_fit_decreasing
from foundry.data.splits import DataSplits
from foundry.models.lora import adapted_layers
from foundry.optim.schedules import Schedule as OwnSchedule
from foundry.parts.optimization import constant_weight_decay

_PACKED_STEPS = 8
"""Number of steps whose packed rows are counted; the efficiency differs little between steps."""
_LENGTHS = {"lr_warmup": "warmup", "lr_decay": "horizon", "wsd_decay": "decay"}


def build_plan(
    config: Config,
    budget: Budget,
    data: DataSplits,
    schedule: Schedule,
    model: nn.Module,
    *,
    world_size: int,
    strategy: str,
    device: str,
    pack_tokens: int | None = None,
) -> dict[str, Any]:
    """Derive the plan of a run.

    Lengths are in optimizer steps or, if their names end in `_samples`, in samples; both may be fractional.

    Args:
        config: the composed configuration.
        budget: size of the run.
        data: samples of the run.
        schedule: learning rate and weight decay.
        model: model whose parameters are counted; they need not be allocated.
        world_size: number of ranks.
        strategy: name of the distributed strategy; never `auto`.
        device: device of the ranks.
        pack_tokens: tokens of a packed row; None if each sample has its own row.
    """
    parameters, dp_size = list(model.parameters()), config.distributed.dp_size(world_size)
    return {
        "world_size": world_size,
        "device": device,
        "strategy": strategy,
        "precision": config.precision.mode.value,
        **_sizes(budget, config.hparams.per_gpu_batch_size, dp_size),
        **_schedule_lengths(schedule, budget),
        **_schedule_values(schedule, budget, constant_weight_decay(config.optimizer)),
        "durations": _durations(config, schedule, budget),
        "phases": [vars(phase) for phase in resolve_phases(schedule, budget)],
        "batch_stages": _batch_stages(budget, config.hparams.per_gpu_batch_size * dp_size),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "adapters": list(adapted_layers(model)),
        **{name: resolve_name(entry.value)(config) for name, entry in planned().items()},
        "packing": None if pack_tokens is None else _packing(config, budget, data, pack_tokens),
        "notes": data.notes or {},
    }


def _packing(config: Config, budget: Budget, data: DataSplits, capacity: int) -> dict[str, Any]:
    """Measure how full the packed rows of the first steps are.

    The number of rows and the efficiency are None if the model generates the answers: their lengths are not known yet.
    """
    if data.train.lengths_of([0]) is None:
        return {"steps": 0, "row_tokens": capacity, "rows_per_step": None, "efficiency": None}
    order = data.order(config.hparams.seed)
    num_steps, tokens, rows, end = min(_PACKED_STEPS, budget.total_steps), 0, 0, 0
    for _ in range(num_steps):
        start, end = end, end + budget.batch_sizes.at(end)
        lengths = data.train.lengths_of(order.indices(range(start, end)).tolist())
        assert lengths is not None
        tokens += int(lengths.sum())
        rows += len(first_fit_decreasing(lengths, capacity)) * lengths[0].size
    return {
        "steps": num_steps,
        "row_tokens": capacity,
        "rows_per_step": rows / num_steps,
        "efficiency": tokens / (rows * capacity),
    }


def planned_updates(
    schedule: Schedule, budget: Budget, weight_decay: float, steps: Iterable[int] | None = None
) -> Iterator[PlannedUpdate]:
    """Yield the learning rate, weight decay and batch size of the run's updates.

    Args:
        schedule: learning rate and weight decay.
        budget: size of the run.
        weight_decay: the optimizer's weight decay, for schedules without one.
        steps: numbers of the updates, counted from one; None for all.
    """
    sizes = budget.batch_sizes
    for step in range(1, budget.total_steps + 1) if steps is None else steps:
        before, after = int(sizes.samples_after(step - 1)), int(sizes.samples_after(step))
        decay = schedule.weight_decay(before, after)
        yield PlannedUpdate(
            step=step,
            samples=after,
            global_batch_size=after - before,
            lr=schedule.lr(before, after),
            weight_decay=weight_decay if decay is None else decay,
        )


def select_steps(schedule: Schedule, budget: Budget, points: int = 500) -> list[int]:
    """Return the numbers of enough steps to plot every curve: evenly spaced steps, and both sides of each corner."""
    total = budget.total_steps
    corners = [stage.first_step for stage in budget.batch_sizes.stages]
    corners += [step for phase in resolve_phases(schedule, budget) for step in (phase.first_step, phase.last_step)]
    near_corners = {step + offset for step in corners[: 4 * points] for offset in (-1, 0, 1)}
    evenly_spaced = range(1, total + 1, max(1, math.ceil(total / points)))
    return sorted(step for step in {1, *evenly_spaced, *near_corners, total} if 1 <= step <= total)


def resolve_phases(schedule: Schedule, budget: Budget) -> list[Phase]:
    """Return the learning-rate phases that the run reaches, in order; empty if the schedule does not define phases."""
    if not isinstance(schedule, HasPhases):
        return []
    # An update belongs to the phase of the sample at which it reads the curve: its last, or with evaluate_at=start its
    # first.
    reads_start = getattr(schedule, "evaluate_at", None) is EvaluateAt.start
    sizes, total = budget.batch_sizes, budget.total_steps
    phases, last_step = list[Phase](), 0
    for name, end in schedule.phases():
        # 0.29 of 100 samples is 28.999999999999996, but a warmup of this length ends with the 29th sample.
        last = (
            total
            if end == math.inf
            else sizes.whole_steps(int(without_rounding_error(end))) + (reads_start and end > 0)
        )
        last = min(total, last)
        if last > last_step:
            phases.append(Phase(name=name, first_step=last_step + 1, last_step=last))
            last_step = last
    return phases


def _sizes(budget: Budget, per_gpu_batch_size: int, dp_size: int) -> dict[str, Any]:
    """Return the size of a step at the final batch size, and of the whole run, in every unit."""
    batch, tokens, epoch = budget.batch_sizes.final, budget.tokens_per_sample, budget.samples_per_epoch
    return {
        "global_batch_size": batch,
        "per_gpu_batch_size": per_gpu_batch_size,
        "accum_freq": batch // (per_gpu_batch_size * dp_size),
        "tokens_per_sample": tokens,
        "tokens_per_step": None if tokens is None else tokens * batch,
        "total_steps": budget.total_steps,
        "total_samples": budget.total_samples,
        "total_tokens": None if tokens is None else tokens * budget.total_samples,
        "total_epochs": budget.total_samples / epoch,
        "samples_per_epoch": epoch,
        "steps_per_epoch": epoch / batch,
    }


def _batch_stages(budget: Budget, microbatch: int) -> list[dict[str, int]]:
    """Return the stages of the global batch size; `microbatch`: samples that all ranks together process at a time."""
    return [
        {
            "first_step": stage.first_step + 1,
            "first_sample": stage.first_sample,
            "global_batch_size": stage.global_batch_size,
            "accum_freq": stage.global_batch_size // microbatch,
        }
        for stage in budget.batch_sizes.stages
    ]


def _schedule_values(schedule: Schedule, budget: Budget, weight_decay: float) -> dict[str, dict[str, float]]:
    updates = list(planned_updates(schedule, budget, weight_decay, select_steps(schedule, budget)))
    first, last = updates[0], updates[-1]
    return {
        "lr": {"first": first.lr, "highest": max(update.lr for update in updates), "last": last.lr},
        "weight_decay": {"first": first.weight_decay, "last": last.weight_decay},
    }


def _schedule_lengths(schedule: Schedule, budget: Budget) -> dict[str, float]:
    if not isinstance(schedule, OwnSchedule):
        return {}
    lengths = dict[str, float]()
    for name, attribute in _LENGTHS.items():
        samples = getattr(schedule, attribute, None)
        if samples is not None:
            lengths[f"{name}_steps"] = _steps(budget, samples, schedule.horizon if attribute == "decay" else None)
            lengths[f"{name}_samples"] = samples
    curve = schedule.weight_decay_curve
    samples = max(schedule.horizon, budget.total_samples) if curve is None else curve.horizon
    return {**lengths, "wd_incr_steps": _steps(budget, samples), "wd_incr_samples": samples}


def _durations(config: Config, schedule: Schedule, budget: Budget) -> dict[str, str]:
    """Return each duration in the settings as given and in steps and samples: `"1"` is one step, `"1.0"` the run."""
    scheduler, evaluation, resolved = config.scheduler, config.evaluation, dict[str, str]()
    if isinstance(scheduler, Scheduler):
        phases = scheduler.phases(budget)
        for name, samples in vars(phases).items():
            if (text := getattr(scheduler, name, None)) is not None:
                end = phases.horizon if name == "decay" else None
                resolved[f"scheduler.{name}"] = _meaning(text, budget, samples, end)
    if isinstance(schedule, OwnSchedule) and (warmup := schedule.momentum_warmup) is not None:
        resolved["optimizer.momentum_warmup"] = _meaning(config.optimizer.momentum_warmup, budget, warmup.samples)
    match evaluation.interval_in(budget):
        case Interval(samples=samples):
            resolved["evaluation.interval"] = _meaning(str(evaluation.interval), budget, samples)
        case EpochInterval() as interval:
            steps = interval.steps_in(0)
            remark = " (all of them)" if isinstance(interval.every, int) and steps < interval.every else ""
            remark += "" if steps <= budget.total_steps else f"; the run has {budget.total_steps}: only at the end"
            resolved["evaluation.interval"] = (
                f"{evaluation.interval} = every {_amount(steps, 'step')} of an epoch{remark}"
            )
    return resolved


def _meaning(text: str, budget: Budget, samples: float, end: float | None = None) -> str:
    return f"{text} = {_amount(_steps(budget, samples, end), 'step')} = {_amount(samples, 'sample')}"


def _amount(number: float, noun: str) -> str:
    return f"{number:.10g} {noun}{'' if number == 1 else 's'}"


def _steps(budget: Budget, samples: float, end: float | None = None) -> float:
    """Return the number of optimizer steps in the first `samples` samples, or in the last `samples` before `end`."""
    sizes, start = budget.batch_sizes, 0.0 if end is None else max(0.0, end - samples)
    return sizes.steps_at(start + samples) - sizes.steps_at(start)
