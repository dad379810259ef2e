"""Lengths of a run: batch sizes, budget, and checks of all durations against them."""

from collections.abc import Iterator

from foundry.config.schemas.hparams import HParams, ScheduleUnit
from foundry.config.schemas.optimizer import Muon
from foundry.config.schemas.root import Config
from foundry.config.schemas.scheduler import Scheduler
from foundry.core.batch_sizes import LARGEST_COUNT, BatchSizes, parse_count
from foundry.core.duration import Budget, Phases
from foundry.core.errors import ConfigError, Violation


def resolve_batch_sizes(hparams: HParams, *, dp_size: int, tokens_per_sample: int | None) -> BatchSizes:
    """Return the global batch size over the course of the run, rounded down if `hparams.allow_rounding` is set.

    Raises:
        ValueError: as `unrounded_batch_sizes`, or if a size is rounded down to 0.
    """
    sizes = unrounded_batch_sizes(hparams, tokens_per_sample=tokens_per_sample)
    return sizes.rounded(hparams.per_gpu_batch_size * dp_size) if hparams.allow_rounding else sizes


def unrounded_batch_sizes(hparams: HParams, *, tokens_per_sample: int | None) -> BatchSizes:
    """Return the unrounded global batch size over the course of the run: constant, ramped, or following a schedule.

    Raises:
        ValueError: if the ramp does not grow to the global batch size, or the schedule cannot be parsed.
    """
    ramp, final = hparams.batch_ramp, hparams.global_batch_size
    if hparams.batch_schedule is not None:
        in_tokens = hparams.batch_schedule_unit is not ScheduleUnit.samples
        return BatchSizes.parse(hparams.batch_schedule, tokens_per_sample=tokens_per_sample if in_tokens else None)
    if ramp.start is not None and ramp.increment is not None:
        if ramp.every_samples is not None:
            ramp_samples = parse_count(ramp.every_samples) * max(1, (final - ramp.start) // ramp.increment)
        elif ramp.over_samples is not None:
            ramp_samples = parse_count(ramp.over_samples)
        else:
            return BatchSizes.constant(final)
        return BatchSizes.ramp(start=ramp.start, increment=ramp.increment, over_samples=ramp_samples, final=final)
    return BatchSizes.constant(final)


def resolve_budget(
    hparams: HParams, *, samples_per_epoch: int, dp_size: int, tokens_per_sample: int | None = None
) -> Budget:
    """Return the length of the run: the shortest of the configured budgets, in whole optimizer steps.

    Raises:
        ConfigError: if the run is shorter than one optimizer step, or has too many samples to be counted.
    """
    sizes = resolve_batch_sizes(hparams, dp_size=dp_size, tokens_per_sample=tokens_per_sample)
    limits = [
        None if hparams.max_steps is None else int(sizes.samples_after(hparams.max_steps)),
        hparams.train_samples,
        # Round, since 0.29 * 100 is 28.999999999999996, which would be one sample less and perhaps one step less.
        None if hparams.epochs is None else int(round(hparams.epochs * samples_per_epoch, 6)),
    ]
    total = min(samples for samples in limits if samples is not None)
    if total > LARGEST_COUNT:
        raise ConfigError(
            Violation("hparams.max_steps", f"makes a run of {total:,} samples; the maximum is {LARGEST_COUNT:,}")
        )
    steps = sizes.whole_steps(total)
    if steps < 1:
        raise ConfigError(
            Violation(
                "hparams.global_batch_size",
                f"is {sizes.at(0)} but the whole run has {total} samples, less than one optimizer step; lower it",
            )
        )
    return Budget(
        total_samples=int(sizes.samples_after(steps)),
        batch_sizes=sizes,
        samples_per_epoch=samples_per_epoch,
        tokens_per_sample=tokens_per_sample,
    )


def check_lengths(config: Config, budget: Budget) -> Iterator[Violation]:
    """Check that phases and warm-ups fit the horizon, the batch ramp fits run or horizon, and intervals fit the run."""
    horizon = float(budget.total_samples)
    if isinstance(config.scheduler, Scheduler):
        try:
            phases = config.scheduler.phases(budget)
        except ValueError as error:
            yield Violation("scheduler", str(error))
            return
        horizon = phases.horizon
        yield from _check_phases(config.scheduler, phases, budget)
    if isinstance(config.optimizer, Muon):
        try:
            config.optimizer.momentum_warmup_samples(budget, horizon)
        except ValueError as error:
            yield Violation("optimizer.momentum_warmup", str(error))
    ramp_end = budget.batch_sizes.stages[-1].first_sample
    end = max(budget.total_samples, horizon)
    if ramp_end >= end:
        yield Violation(
            "hparams.batch_ramp" if config.hparams.batch_schedule is None else "hparams.batch_schedule",
            f"reaches its last size, {budget.batch_sizes.final}, after {ramp_end} samples, but the run has only "
            f"{budget.total_samples}; shorten it, or set scheduler.horizon to the length of the full schedule",
        )
    try:
        yield from config.evaluation.check_patience(budget)
    except ValueError as error:
        yield Violation("evaluation.interval", f"{error}; shorten it, or set it to null to evaluate only at the end")
    try:
        config.checkpoint.interval_in(budget)
    except ValueError as error:
        yield Violation("checkpoint.interval", f"{error}; shorten it, or set it to null to save by time only")


def _check_phases(scheduler: Scheduler, phases: Phases, budget: Budget) -> Iterator[Violation]:
    horizon = phases.horizon
    warmup = phases.warmup
    decay = phases.decay or 0.0
    sizes = budget.batch_sizes
    schedule_steps = sizes.steps_at(horizon)
    # Tolerance, since 0.2 and 0.8 of 3 samples sum to 3.0000000000000004.
    if warmup + decay > horizon * (1 + 1e-12) or (warmup == horizon and decay == 0 and schedule_steps > 1):
        text, verb = f"warm-up of {sizes.steps_at(warmup):g} steps", "does"
        if phases.decay is not None:
            length = schedule_steps - sizes.steps_at(max(0.0, horizon - decay))
            text, verb = text + " and a", "do"
            text += f" decay of {length:g} steps (scheduler.decay={getattr(scheduler, 'decay', '')})"
        yield Violation(
            "scheduler.warmup",
            f"is {scheduler.warmup}: a {text} {verb} not fit into the {schedule_steps:g} steps of the schedule; "
            f"shorten them, or give a fraction such as 0.05",
        )
