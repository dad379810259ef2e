"""The parts of a run put together: a trainer at the point where the run starts or resumes."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from foundry.checkpoint.resume_point import restore_rng
from foundry.checkpoint.rng import seed_rng
from foundry.checkpoint.saver import Checkpointer, NoCheckpoints
from foundry.checkpoint.tensors import read_source_tensors
from foundry.config.build import field_of
from foundry.config.record.frozen import plain, strict
from foundry.config.schemas.root import Config
from foundry.config.sources import listed_paths
from foundry.core.duration import Budget
from foundry.core.events import RunStarted
from foundry.core.model_hooks import hook
from foundry.core.progress import Progress
from foundry.core.protocols import (
    CheckpointManager,
    SourceContext,
    StopRule,
    WindowSource,
)
from foundry.data.loader import Loader
from foundry.data.splits import DataSplits
from foundry.engine.first_step import FirstStepCheck
from foundry.engine.run_files import write_architecture
from foundry.engine.trained import Setup, Trained, build_trained, join_samples
from foundry.evaluators.build import build_evaluators, build_stop_rules
from foundry.evaluators.pruning import Pruning
from foundry.models.fsdp_block import find_blocks
from foundry.parallel.device import describe_devices, device_name
from foundry.parallel.flight_recorder import dump_collectives, dump_into
from foundry.parallel.process_group import World, limit_waits
from foundry.parallel.rank_flags import RankFlags
from foundry.parallel.watchdog import EXIT_STALLED, Watchdog
from foundry.parts.data import samples_per_epoch
from foundry.parts.optimization import constant_weight_decay
from foundry.planning.derive import build_plan, planned_updates, resolve_phases, select_steps
from foundry.rollouts.source import build_rollouts
from foundry.run_dir.ends import dump_stacks, leave_note, read_positions, record_end
from foundry.run_dir.lock import check_ours
from foundry.run_dir.names import PLOTS, PROFILE
from foundry.training.best import Best
from foundry.training.block_norms import BlockNorms, group_by_block
from foundry.training.compiling import Recompilations
from foundry.training.evaluation import Evaluation
from foundry.training.memory_error import explain_out_of_memory, measure_device_memory
from foundry.training.profiling import StepProfiler
from foundry.training.signals import SignalHandler
from foundry.training.step import TrainStep
from foundry.training.throughput import Throughput
from foundry.training.trainer import Trainer


def build_trainer(setup: Setup) -> tuple[Trainer, RunStarted]:
    """Build every part, bring each to where the run resumes, and give them to a trainer; also what the run will be.

    Raises:
        ConfigError: a part cannot be built from its settings, or the checkpoint is of other parts.
    """
    config, world, resume_point = setup.config, setup.world, setup.resume_point
    if world.world_size > 1:
        dump_into(setup.run_dir, world.device)
    trained = build_trained(setup)
    setup = replace(setup, data=join_samples(setup, trained))
    trainer = _build_trainer(setup, trained)
    if resume_point is None:
        seed_rng(config.hparams.seed + 1 + world.rank)
    else:
        with resume_point.reading():
            trainer.load_state_dict(resume_point.state)
            trainer.source.load_tensors(read_source_tensors(resume_point.folder, world))
            restore_rng(resume_point, world, config.hparams.seed)
    if world.is_main:
        write_architecture(config, trained.unwrapped, setup.run_dir)
    return trainer, _describe(setup, trained, step=trainer.progress.steps)


def _build_trainer(setup: Setup, trained: Trained) -> Trainer:
    config = setup.config
    world = setup.world
    data = setup.data
    budget = trained.budget
    progress = Progress(samples_per_epoch=samples_per_epoch(config, data), tokens_per_sample=data.tokens_per_sample)
    watchdog = _build_watchdog(setup)

    def beat(what: str) -> None:
        watchdog.beat(progress.steps + 1, what)

    step = TrainStep(
        model=trained.parallel.model,
        objective=trained.objective,
        optimizers=trained.optimizers,
        sync=trained.parallel.sync,
        precision=trained.precision,
        world=world,
        max_grad_norm=config.hparams.grad_clip_norm,
        guard=config.guard,
        norms=_build_norms(config, trained, world),
    )
    checked = config.hparams.check_first_step
    is_checked = world.device.type == "cuda" if checked == "auto" else checked is True
    return Trainer(
        step=step,
        source=_build_source(setup, trained, beat),
        schedule=trained.schedule,
        constant_weight_decay=constant_weight_decay(config),
        progress=progress,
        budget=budget,
        max_seconds=None if config.hparams.max_minutes is None else 60 * config.hparams.max_minutes,
        world=world,
        throughput=_build_throughput(setup, trained.unwrapped),
        watchdog=watchdog,
        log_every_n_steps=config.tracking.log_every_n_steps,
        evaluation_interval=config.evaluation.interval_in(budget),
        evaluation=Evaluation(
            model=trained.parallel.model,
            evaluators=build_evaluators(config, trained.objective, data, setup.judge),
            precision=trained.precision,
            world=world,
            folder=setup.run_dir / PLOTS,
        ),
        metric=config.evaluation.metric,
        stop_rules=_build_stop_rules(setup, trained),
        best=Best(config.checkpoint.keep_best, config.evaluation.metric),
        checkpoints=_build_checkpoints(setup, trained, watchdog),
        rank_flags=RankFlags(world),
        signals=SignalHandler(),
        ema=trained.ema,
        max_rollbacks=config.guard.max_skips,
        profiler=StepProfiler(
            setup.run_dir / PROFILE, rank=world.rank, steps=config.tracking.profile.steps, device=world.device
        ),
        recompilations=Recompilations(is_compiled=setup.config.hparams.torchcompile),
        check_first_step=FirstStepCheck(setup, trained, step) if is_checked else None,
        save_final=config.checkpoint.save_final,
        explain_out_of_memory=partial(_explain_out_of_memory, setup, trained),
    )


def _build_norms(config: Config, trained: Trained, world: World) -> BlockNorms | None:
    """What measures gradients, weights and updates by block, where that is wanted."""
    every, inner = config.tracking.norms_every_n_steps, trained.parallel.inner
    if every is None:
        return None
    return BlockNorms(group_by_block(inner, find_blocks(inner)), every_n_steps=every, device=world.device)


def _build_watchdog(setup: Setup) -> Watchdog:
    """What ends the run where a rank waits too long, and says of all ranks what they were doing."""
    world, limits = setup.world, setup.config.distributed
    return Watchdog(
        limits.timeout_seconds,
        world.rank,
        world_size=world.world_size,
        start_timeout_seconds=limits.start_limit_seconds,
        dump=partial(_dump, setup.run_dir, world),
        read_dumps=partial(read_positions, setup.run_dir, world.rank, world.world_size, limits.timeout_seconds / 2),
        record=partial(_record_stall, setup.run_dir),
        when_started=partial(limit_waits, limits.timeout_seconds),
        on_beat=setup.on_activity,
    )


def _build_stop_rules(setup: Setup, trained: Trained) -> dict[str, StopRule]:
    """What may end the run early: first the search that proposed it, if one did."""
    pruning = Pruning.of(setup.run_dir, setup.world)
    searched: dict[str, StopRule] = {} if pruning is None else {"pruning": pruning}
    return searched | build_stop_rules(setup.config, trained.objective, setup.data, setup.judge)


def _build_source(setup: Setup, trained: Trained, beat: Callable[[str], None]) -> WindowSource:
    """Where windows come from: the training data, what the model generates, or the objective's own source."""
    world, objective = setup.world, trained.objective
    if objective.rollouts is not None:
        return build_rollouts(
            objective,
            model=trained.parallel.model,
            frozen=[trained.frozen[name] for name in objective.recorded_models],
            data=setup.data,
            judge=setup.judge,
            world=world,
            autocast=partial(trained.precision.autocast, world.device),
            seed=setup.config.hparams.seed,
            per_gpu_batch_size=setup.config.hparams.per_gpu_batch_size,
            beat=beat,
            pack_tokens=trained.pack_tokens,
        )
    if objective.build_source is None:
        return _build_loader(setup, trained.budget, pack_tokens=trained.pack_tokens)
    context = SourceContext(
        model=trained.parallel.model,
        data=setup.data,
        world=world,
        autocast=partial(trained.precision.autocast, world.device),
        seed=setup.config.hparams.seed,
        batch_size_at=trained.budget.batch_sizes.at,
        build_loader=partial(_build_loader, setup, trained.budget),
    )
    return objective.build_source(context)


def _build_loader(setup: Setup, budget: Budget, is_whole: bool = False, pack_tokens: int | None = None) -> Loader:
    """The training samples in the global order: of this rank, or all of them."""
    config, data, world = setup.config, setup.data, setup.world
    return Loader(
        dataset=data.train,
        order=data.order(config.hparams.seed),
        batch_size_at=budget.batch_sizes.at,
        per_gpu_batch_size=config.hparams.per_gpu_batch_size,
        dp_rank=0 if is_whole else world.dp_rank,
        dp_size=1 if is_whole else world.dp_size,
        num_workers=field_of(config.data, "num_workers", 0),
        pin_memory=world.device.type == "cuda",
        tokens_per_sample=data.tokens_per_sample,
        pack_tokens=pack_tokens,
    )


def _build_throughput(setup: Setup, model: nn.Module) -> Throughput:
    """What measures speed; FLOPs where the model, as it was before wrapping, says them."""
    count, tokens = hook(model, "flops_per_sample"), setup.data.tokens_per_sample
    flops = None if count is None else float(count() if tokens is None else count(tokens))
    return Throughput(
        world_size=setup.world.world_size,
        device=setup.world.device,
        precision=setup.config.precision.mode,
        tf32=setup.config.precision.tf32,
        flops_per_sample=flops,
        tokens_per_sample=tokens,
    )


def _build_checkpoints(setup: Setup, trained: Trained, watchdog: Watchdog) -> CheckpointManager:
    """What writes checkpoints, where any are wanted."""
    config, world = setup.config, setup.world
    wanted = config.checkpoint
    if wanted.is_off:
        return NoCheckpoints()
    return Checkpointer(
        setup.run_dir,
        world,
        asynchronous=wanted.asynchronous,
        keep_last=wanted.keep_last,
        keep_every_steps=wanted.keep_every,
        strict=wanted.strict_saves,
        check_run_dir=partial(check_ours, setup.run_dir),
        alive=watchdog.alive,
        model=trained.parallel.model,
        ema=trained.ema,
        optimizers=trained.optimizers,
        interval=wanted.interval_in(trained.budget),
        every_minutes=wanted.every_minutes,
        facts={
            "config_hash": setup.config_hash,
            "config": strict(config),
            "strategy": world.distributed.strategy,
            "data": setup.data.identity(),
            "base": {} if trained.base is None else trained.base.facts(),
        },
        trained_only=trained.base is not None,
    )


def _describe(setup: Setup, trained: Trained, *, step: int) -> RunStarted:
    """What observers get when the run starts."""
    config, schedule, budget = setup.config, trained.schedule, trained.budget
    plan = build_plan(
        config,
        budget,
        setup.data,
        schedule,
        trained.parallel.model,
        world_size=setup.world.world_size,
        strategy=setup.world.distributed.strategy,
        device=device_name(setup.world.device),
        pack_tokens=trained.pack_tokens,
    )
    shown = select_steps(schedule, budget)
    return RunStarted(
        run_dir=setup.run_dir,
        config=plain(config),
        config_hash=setup.config_hash,
        plan=plan,
        updates=list(planned_updates(schedule, budget, constant_weight_decay(config), shown)),
        phases=resolve_phases(schedule, budget),
        step=step,
        metric=config.evaluation.metric,
        data=_data_facts(config.data, setup.data),
        devices=describe_devices(setup.world.device, setup.world.world_size),
    )


def _data_facts(node: Any, data: DataSplits) -> dict[str, str]:
    """What tells data from other data, for people and trackers."""
    paths = listed_paths(field_of(node, "path"))
    source, name = ", ".join(paths), ", ".join(Path(path).name for path in paths)
    name = name or str(field_of(node, "_target_")).rpartition(".")[2]
    digest = hashlib.sha256(str(data.identity()["content"]).encode(errors="surrogateescape")).hexdigest()[:32]
    return {"name": name, "digest": digest, "source": source}


def _dump(run_dir: Path, world: World, step: int, doing: str) -> None:
    """Write down where this process is, and which collectives it has begun."""
    dump_stacks(run_dir, world.rank, step, doing)
    if world.world_size > 1:
        dump_collectives(run_dir, world.rank, world.device)


def _record_stall(run_dir: Path, rank: int, reason: str, stack: str) -> None:
    leave_note(kind="Stalled", reason=reason, trace=stack, rank=rank, exit_code=EXIT_STALLED)
    record_end(run_dir, reason, stack)


def _explain_out_of_memory(setup: Setup, trained: Trained, error: BaseException, moment: str) -> str:
    averages = () if trained.ema is None else trained.ema.average.values()
    memory = measure_device_memory(
        trained.parallel.model,
        trained.optimizers,
        setup.world.device,
        averages=averages,
        frozen=trained.frozen.values(),
    )
    return explain_out_of_memory(
        error,
        memory,
        setup.config,
        distributed=setup.world.distributed,
        moment=moment,
        rank=setup.world.rank,
        world_size=setup.world.world_size,
    )
