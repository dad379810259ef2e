"""Assembly of a run's parts into a trainer at the step where the run starts or resumes."""

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from foundry.checkpoint.mirror.thread import Mirror
from foundry.checkpoint.resume_point import restore_rng
from foundry.checkpoint.rng import seed_rng
from foundry.checkpoint.saver import Checkpointer, NoCheckpoints
from foundry.checkpoint.tensors import read_source_tensors
from foundry.config.build import field_of, find_method_problem
from foundry.config.record.frozen import plain, strict
from foundry.config.sources import listed_paths
from foundry.core.duration import Budget, Duration, Interval, check_rung
from foundry.core.errors import ConfigError, Violation
from foundry.core.events import RunStarted
from foundry.core.model_hooks import hook
from foundry.core.progress import Progress
from foundry.core.protocols import (
    CheckpointManager,
    RunContext,
    SourceContext,
    StopRule,
    WindowSource,
)
from foundry.data.loader import Loader
from foundry.data.splits import DataSplits
from foundry.engine.first_step import FirstStepCheck
from foundry.engine.run_files import write_architecture
from foundry.engine.stalls import build_watchdog
from foundry.engine.trained_models import Trained, build_trained, join_samples
from foundry.evaluators.build import build_evaluators, build_stop_rules
from foundry.evaluators.pruning import Pruning
from foundry.models.fsdp_block import find_blocks
from foundry.parallel.device import describe_devices, device_name
from foundry.parallel.flight_recorder import dump_into
from foundry.parallel.gathering import broadcast
from foundry.parallel.rank_flags import RankFlags
from foundry.parallel.watchdog import Watchdog
from foundry.parts.data import samples_per_epoch
from foundry.parts.optimization import constant_weight_decay
from foundry.planning.derive import build_plan, planned_updates, resolve_phases, select_steps
from foundry.run_dir.lock import check_locked
from foundry.run_dir.names import PLOTS, PROFILE, RUNG
from foundry.run_dir.rung import Rung
from foundry.training.best import Best
from foundry.training.block_norms import BlockNorms, group_by_block
from foundry.training.compiling import Recompilations
from foundry.training.evaluation import Evaluation
from foundry.training.memory_error import explain_out_of_memory, measure_device_memory
from foundry.training.pause import Pause
from foundry.training.profiling import StepProfiler
from foundry.training.signals import SignalHandler
from foundry.training.step import TrainStep
from foundry.training.throughput import Throughput
from foundry.training.trainer import Trainer


def build_trainer(run: RunContext, mirror: Mirror | None = None) -> tuple[Trainer, RunStarted]:
    """Build all parts, restore their state if the run resumes, and return the trainer with the event for observers.

    Args:
        run: the run.
        mirror: thread that copies checkpoints; None for a run without a mirror.

    Raises:
        ConfigError: a part cannot be built from its settings, or the checkpoint does not match the parts.
    """
    config, world, resume_point = run.config, run.world, run.resume_point
    if world.world_size > 1:
        dump_into(run.run_dir, world.device)
    trained = build_trained(run)
    run = replace(run, data=join_samples(run, trained.objective))
    trainer = _build_trainer(run, trained, mirror)
    if resume_point is None:
        seed_rng(config.hparams.seed + 1 + world.rank)
    else:
        with resume_point.reading():
            trainer.load_state_dict(resume_point.state)
            trainer.source.load_tensors(read_source_tensors(resume_point.folder, world))
            restore_rng(resume_point, world, config.hparams.seed)
    if world.is_main:
        write_architecture(config.model, trained.unwrapped, run.run_dir)
    return trainer, _describe(run, trained, step=trainer.progress.steps)


def _build_trainer(run: RunContext, trained: Trained, mirror: Mirror | None) -> Trainer:
    config, world, data, budget = run.config, run.world, run.data, trained.budget
    progress = Progress(
        samples_per_epoch=samples_per_epoch(config.objective, data), tokens_per_sample=data.tokens_per_sample
    )
    watchdog = build_watchdog(run)
    run = replace(run, heartbeat=watchdog.now)
    step = _build_step(run, trained)
    return Trainer(
        step=step,
        source=_build_source(run, trained),
        schedule=trained.schedule,
        constant_weight_decay=constant_weight_decay(config.optimizer),
        progress=progress,
        budget=budget,
        max_seconds=None if config.hparams.max_minutes is None else 60 * config.hparams.max_minutes,
        world=world,
        throughput=_build_throughput(run, trained.unwrapped),
        watchdog=watchdog,
        log_every_n_steps=config.tracking.log_every_n_steps,
        evaluation_interval=config.evaluation.interval_in(budget),
        evaluation=Evaluation(
            model=trained.parallel.model,
            evaluators=build_evaluators(run, trained.objective),
            run=run,
            folder=run.run_dir / PLOTS,
        ),
        metric=config.evaluation.metric,
        stop_rules=_build_stop_rules(run, trained),
        best=Best(config.checkpoint.keep_best, config.evaluation.metric),
        checkpoints=_build_checkpoints(run, trained, watchdog, mirror),
        rank_flags=RankFlags(world),
        signals=SignalHandler(),
        ema=trained.ema,
        max_rollbacks=config.guard.max_skips,
        profiler=_build_profiler(run),
        recompilations=Recompilations(is_compiled=config.hparams.torchcompile),
        check_first_step=_build_first_step_check(run, trained, step),
        save_final=config.checkpoint.save_final,
        pause=_find_pause(run, budget),
        explain_out_of_memory=partial(_explain_out_of_memory, run, trained),
    )


def _build_step(run: RunContext, trained: Trained) -> TrainStep:
    return TrainStep(
        model=trained.parallel.model,
        objective=trained.objective,
        optimizers=trained.optimizers,
        sync=trained.parallel.sync,
        precision=run.precision,
        world=run.world,
        max_grad_norm=run.config.hparams.grad_clip_norm,
        guard=run.config.guard,
        norms=_build_norms(run, trained),
    )


def _build_first_step_check(run: RunContext, trained: Trained, step: TrainStep) -> FirstStepCheck | None:
    """Return the check of the largest shape; None if it is off, by default on CPUs."""
    setting = run.config.hparams.check_first_step
    is_checked = run.world.device.type == "cuda" if setting == "auto" else setting is True
    return FirstStepCheck(run, trained, step) if is_checked else None


def _build_norms(run: RunContext, trained: Trained) -> BlockNorms | None:
    """Return the recorder of norms by block; None if `tracking.norms_every_n_steps` is not set."""
    every, inner = run.config.tracking.norms_every_n_steps, trained.parallel.inner
    if every is None:
        return None
    return BlockNorms(group_by_block(inner, find_blocks(inner)), every_n_steps=every, device=run.world.device)


def _build_source(run: RunContext, trained: Trained) -> WindowSource:
    """Return the source of windows: a loader of the training data, or the source that the objective builds."""
    objective, pack_tokens = trained.objective, trained.pack_tokens
    if objective.build_source is None:
        return _build_loader(run, trained.budget, pack_tokens=pack_tokens)
    context = SourceContext.of(
        run,
        model=trained.parallel.model,
        batch_size_at=trained.budget.batch_sizes.at,
        build_loader=partial(_build_loader, run, trained.budget),
        frozen=trained.frozen,
        pack_tokens=pack_tokens,
    )
    source = objective.build_source(context)
    if problem := find_method_problem(source, WindowSource):
        raise ConfigError(Violation("objective._target_", f"has a build_source() that {problem}"))
    return source


def _build_loader(run: RunContext, budget: Budget, all_samples: bool = False, pack_tokens: int | None = None) -> Loader:
    """Return a loader of the training samples in the global order: this rank's part, or with `all_samples` all."""
    config, data, world = run.config, run.data, run.world
    return Loader(
        dataset=data.train,
        order=data.order(config.hparams.seed),
        batch_size_at=budget.batch_sizes.at,
        per_gpu_batch_size=config.hparams.per_gpu_batch_size,
        dp_rank=0 if all_samples else world.dp_rank,
        dp_size=1 if all_samples else world.dp_size,
        num_workers=field_of(config.data, "num_workers", 0),
        pin_memory=world.device.type == "cuda",
        tokens_per_sample=data.tokens_per_sample,
        pack_tokens=pack_tokens,
    )


def _build_throughput(run: RunContext, model: nn.Module) -> Throughput:
    """Return the throughput meter; FLOPs are known if the unwrapped model has `flops_per_sample`."""
    count, tokens = hook(model, "flops_per_sample"), run.data.tokens_per_sample
    flops = None if count is None else float(count() if tokens is None else count(tokens))
    return Throughput(
        world_size=run.world.world_size,
        device=run.world.device,
        precision=run.config.precision.mode,
        tf32=run.config.precision.tf32,
        flops_per_sample=flops,
        tokens_per_sample=tokens,
    )


def _build_stop_rules(run: RunContext, trained: Trained) -> dict[str, StopRule]:
    """Return the stop rules by name; the pruner comes first if a search started this run."""
    pruning = Pruning.of(run.run_dir, run.world)
    search_rules: dict[str, StopRule] = {} if pruning is None else {"pruning": pruning}
    return search_rules | build_stop_rules(run, trained.objective)


def _find_pause(run: RunContext, budget: Budget) -> Pause | None:
    """Return the rung of the search that started this run, the same on all ranks; None if the run trains to its end.

    Raises:
        ConfigError: rank 0's rung.json is not valid for this run.
    """
    try:
        rung, problem = (Rung.load(run.run_dir) if run.world.is_main else None), ""
    except (ValueError, OSError) as error:
        rung, problem = None, str(error)
    rung, problem = broadcast((rung, problem), run.world)
    if not problem and (rung is None or rung.at is None):
        return None
    try:
        if rung is None or rung.at is None:
            raise ValueError(problem)
        length = Duration.parse_positive(rung.at)
        if rung.number == 1:
            check_rung(length, budget)
        if length.samples(budget) >= budget.total_samples:
            return None
        return Pause(rung=rung.number, at=Interval.parse(rung.at, budget), metric=rung.metric)
    except ValueError as error:
        message = f"is {run.run_dir}, whose {RUNG} is not valid for a search of foundry: {error}; remove that file"
        raise ConfigError(Violation("hydra.run.dir", message)) from None


def _build_checkpoints(
    run: RunContext, trained: Trained, watchdog: Watchdog, mirror: Mirror | None
) -> CheckpointManager:
    """Return the checkpoint manager; one that saves nothing if checkpoints are off."""
    config, world = run.config, run.world
    settings = config.checkpoint
    if settings.is_off:
        return NoCheckpoints()
    return Checkpointer(
        run.run_dir,
        world,
        asynchronous=settings.asynchronous,
        keep_last=settings.keep_last,
        keep_every_steps=settings.keep_every,
        strict=settings.strict_saves,
        check_run_dir=partial(check_locked, run.run_dir),
        alive=watchdog.alive,
        model=trained.parallel.model,
        ema=trained.ema,
        optimizers=trained.optimizers,
        interval=settings.interval_in(trained.budget),
        every_minutes=settings.every_minutes,
        facts={
            "config_hash": run.config_hash,
            "config": strict(config),
            "strategy": world.distributed.strategy,
            "data": run.data.identity(),
            "base": {} if trained.base is None else trained.base.facts(),
        },
        trained_only=trained.base is not None,
        mirror=mirror,
    )


def _build_profiler(run: RunContext) -> StepProfiler | None:
    """Return the profiler; None if `tracking.profile` selects no steps."""
    steps = run.config.tracking.profile.steps
    if not steps:
        return None
    return StepProfiler(run.run_dir / PROFILE, rank=run.world.rank, steps=steps, device=run.world.device)


def _explain_out_of_memory(run: RunContext, trained: Trained, error: BaseException, moment: str) -> str:
    averages = () if trained.ema is None else trained.ema.average.values()
    memory = measure_device_memory(
        trained.parallel.model,
        trained.optimizers,
        run.world.device,
        averages=averages,
        frozen=trained.frozen.values(),
    )
    return explain_out_of_memory(
        error,
        memory,
        run.config,
        distributed=run.world.distributed,
        moment=moment,
        rank=run.world.rank,
        world_size=run.world.world_size,
    )


def _describe(run: RunContext, trained: Trained, *, step: int) -> RunStarted:
    """Return the event that observers receive when the run starts."""
    config, schedule, budget = run.config, trained.schedule, trained.budget
    plan = build_plan(
        config,
        budget,
        run.data,
        schedule,
        trained.parallel.model,
        world_size=run.world.world_size,
        strategy=run.world.distributed.strategy,
        device=device_name(run.world.device),
        pack_tokens=trained.pack_tokens,
    )
    steps = select_steps(schedule, budget)
    return RunStarted(
        run_dir=run.run_dir,
        config=plain(config),
        config_hash=run.config_hash,
        plan=plan,
        updates=list(planned_updates(schedule, budget, constant_weight_decay(config.optimizer), steps)),
        phases=resolve_phases(schedule, budget),
        step=step,
        metric=config.evaluation.metric,
        data=_data_facts(config.data, run.data),
        devices=describe_devices(run.world.device, run.world.world_size),
    )


def _data_facts(node: Any, data: DataSplits) -> dict[str, str]:
    """Return name, digest and source of the data, for people and trackers."""
    paths = listed_paths(field_of(node, "path"))
    source, name = ", ".join(paths), ", ".join(Path(path).name for path in paths)
    name = name or str(field_of(node, "_target_")).rpartition(".")[2]
    digest = hashlib.sha256(str(data.identity()["content"]).encode(errors="surrogateescape")).hexdigest()[:32]
    return {"name": name, "digest": digest, "source": source}
