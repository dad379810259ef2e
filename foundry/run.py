"""One run: the only place where the parts meet."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from foundry.checkpoint.finished import check_finished, read_result
from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.init_from import init_from
from foundry.checkpoint.manager import NoCheckpoints, ShardedCheckpointManager
from foundry.checkpoint.resume_point import (
    ResumePoint,
    check_config,
    check_data,
    find_resume_point,
    is_longer,
    past_its_end,
    restore_rng,
)
from foundry.checkpoint.rng import seed_rng
from foundry.checkpoint.saver import Checkpointer
from foundry.checkpoint.tensors import restore_into
from foundry.config.duration import Budget
from foundry.config.errors import ConfigError, Violation
from foundry.config.frozen import FILE_NAME as CONFIG_FILE
from foundry.config.frozen import hash_config, plain, save_config
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.root import Config
from foundry.data.loader import worker_deaths_explained
from foundry.data.splits import DataSplits
from foundry.optim.schedule_state import reconcile
from foundry.parallel.gathering import gather
from foundry.parallel.malloc import keep_freed_memory
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World, process_group, roll_call
from foundry.parallel.rank_flags import RankFlags
from foundry.parallel.watchdog import EXIT_STALLED, CollectiveError, Watchdog
from foundry.parallel.wrap import Parallel, parallelize
from foundry.parts import (
    build_budget,
    build_data,
    build_evaluator,
    build_loader,
    build_model,
    build_objective,
    build_optimizers,
    build_schedule,
    build_throughput,
    resolve_init_from,
)
from foundry.planning.derive import (
    PLAN,
    build_plan,
    constant_weight_decay,
    planned_updates,
    resolve_phases,
    select_steps,
)
from foundry.run_dir.ends import leave_note, record_end, record_if_dead
from foundry.run_dir.files import UnsafeFileError, make_folder, write_atomically
from foundry.run_dir.folder import RunFolder
from foundry.run_dir.lock import lock, relock
from foundry.run_dir.log import move_logs
from foundry.run_dir.status import read_status
from foundry.run_dir.strict_json import encode
from foundry.sweeps.pruning import Pruning
from foundry.tracking.folder_watch import FolderWatch
from foundry.tracking.observers import build_observers
from foundry.training.best import Best
from foundry.training.early_stopping import EarlyStopping
from foundry.training.ema import WeightAverage
from foundry.training.events import Observer, RunEnded, RunStarted
from foundry.training.memory_error import explain_out_of_memory, measure_device_memory, memory_explained
from foundry.training.progress import Progress
from foundry.training.protocols import CheckpointManager, Objective, Schedule
from foundry.training.signals import SignalHandler
from foundry.training.step import TrainStep
from foundry.training.trainer import Trainer

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
"""The tokenizer's file in a run directory, so that sampling and export need no training data."""

TRANSFORMERS = "transformers"
"""A folder with the config of a model of transformers, so that they need not read the folder it came from either."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `result` is what result.json holds, `metric` what a sweep minimises."""

    run_dir: Path
    result: dict[str, Any]

    @property
    def metric(self) -> float | None:
        """The held-out loss at the end."""
        return self.result.get("metric")


def run(config: Config, run_dir: Path) -> RunResult:
    """Train, on this process and those started with it; a run directory that holds an unfinished run goes on.

    Args:
        config: the composed configuration; every rank has the same.
        run_dir: where rank 0 writes; the other ranks take rank 0's.

    Raises:
        ConfigError: the data or the machine shows a setting to be wrong, or the run that is to go on had others;
            nothing has been trained.
        NonFiniteError: the loss or gradient became NaN or infinite.
        Stopped: a signal came; the run is saved.
    """
    config_hash = hash_config(config)
    with process_group(config.distributed) as world, ExitStack() as held:
        if world.device.type == "cpu":
            keep_freed_memory()
        run_dir, state = _agree(world, run_dir, config_hash, held)
        resume_point = find_resume_point(config.checkpoint.resume, run_dir, world)
        result = read_result(run_dir) if state == "finished" else None
        if result is not None and not is_longer(resume_point, _recorded(config)):
            check_finished(
                config,
                _recorded(config),
                config_hash,
                run_dir,
                resume_point,
                result,
                lambda: build_data(config).identity(),
            )
            return RunResult(run_dir, result)
        if resume_point is not None:
            check_config(resume_point, config, _recorded(config), config.checkpoint.on_changed_config)
            if state == "finished":
                resume_point = past_its_end(resume_point)
        observers = build_observers(config.tracking, run_dir) if world.is_main else []
        with (
            _told(observers),
            _rank_zero_missed(run_dir, world),
            worker_deaths_explained(),
            memory_explained(world.device, world.rank),
        ):
            data = _data(config, resume_point)
            folder = RunFolder(run_dir, marker=CONFIG_FILE) if world.is_main else None
            trainer, plan = _assemble(config, config_hash, data, run_dir, world, resume_point, folder)
            if folder is not None:
                _write_facts(config, plan, data, run_dir)
                held.callback(folder.close)
                folder.refill = partial(_refill, config, plan, data, held)
                observers.insert(0, FolderWatch(folder, observers, trainer.evaluator.move))
            trainer.observers = observers
            started = _started(config, config_hash, trainer, plan, run_dir)
            with trainer.watchdog, trainer.signals:
                result = trainer.fit(started)
            return RunResult(run_dir if folder is None else folder.path, result)


def _data(config: Config, resume_point: ResumePoint | None) -> DataSplits:
    """The data, in the order in which a run that is resumed has begun to read it."""
    data = build_data(config)
    if resume_point is None:
        return data
    identity = data.identity()
    order = check_data(resume_point, identity, plain(config.data), config.checkpoint.on_changed_config)
    return replace(data, content=identity["content"], fingerprint=order)


def _started(config: Config, config_hash: str, trainer: Trainer, plan: dict[str, Any], run_dir: Path) -> RunStarted:
    schedule, budget = trainer.schedule, trainer.budget
    shown = select_steps(schedule, budget)
    return RunStarted(
        run_dir=run_dir,
        config=plain(config),
        config_hash=config_hash,
        plan=plan,
        updates=list(planned_updates(schedule, budget, trainer.constant_weight_decay, shown)),
        phases=resolve_phases(schedule, budget),
        step=trainer.progress.steps,
    )


def _write_facts(config: Config, plan: dict[str, Any], data: DataSplits, run_dir: Path) -> None:
    """What a run directory holds from the start.

    Raises:
        ConfigError: there is something in the place of one of its files.
    """
    try:
        save_config(config, run_dir)
        write_atomically(run_dir / PLAN, json.dumps(plan, indent=2) + "\n")
        if data.tokenizer is not None:
            write_atomically(run_dir / TOKENIZER, data.tokenizer.to_str(pretty=True))
        for name in ("status.json", "result.json"):
            if (run_dir / name).is_dir():
                raise UnsafeFileError(run_dir / name, "a folder")
    except UnsafeFileError as error:
        raise ConfigError(Violation("hydra.run.dir", str(error))) from None


def _write_architecture(config: Config, model: Any, run_dir: Path) -> None:
    """Of a model that was read from a folder of transformers, what it is built from, should the folder be gone."""
    if isinstance(config.model, HuggingFace) and config.model.path is not None:
        write_atomically(make_folder(run_dir / TRANSFORMERS) / "config.json", model.hf_config().to_json_string())


def _refill(config: Config, plan: dict[str, Any], data: DataSplits, held: ExitStack, run_dir: Path) -> None:
    """Make a new folder the run's, whose own was lost."""
    if not relock(run_dir, held):
        raise BlockingIOError(f"another process trains in {run_dir}")
    move_logs(run_dir)
    _write_facts(config, plan, data, run_dir)


def _recorded(config: Config) -> dict[str, Any]:
    """The configuration as a manifest holds it, in strict JSON: no gradient clipping may be a norm of infinity."""
    recorded: dict[str, Any] = json.loads(encode(plain(config)))
    return recorded


def _assemble(
    config: Config,
    config_hash: str,
    data: DataSplits,
    run_dir: Path,
    world: World,
    resume_point: ResumePoint | None,
    folder: RunFolder | None,
) -> tuple[Trainer, dict[str, Any]]:
    """Build the parts, bring them to where they go on from, and hand them to a trainer; also the plan of the run."""
    hparams = config.hparams
    budget = build_budget(config, data, world.world_size)
    policy = PrecisionPolicy.from_config(config.precision, world.device)
    model = build_model(config)
    if resume_point is None and (weights := resolve_init_from(config)) is not None:
        init_from(model, weights, world)
    parallel = parallelize(
        policy.prepare(model),
        config.distributed,
        policy,
        world,
        grad_checkpointing=hparams.grad_checkpointing,
        torchcompile=hparams.torchcompile,
    )
    optimizers = build_optimizers(config, parallel.model)
    ema = None if hparams.ema_decay is None else WeightAverage(parallel.inner, hparams.ema_decay)
    objective = build_objective(config)
    schedule = build_schedule(config, budget)
    if resume_point is not None:
        try:
            restore_into(resume_point.folder, parallel.model, ema, optimizers)
        except CheckpointError as error:
            raise ConfigError(Violation("checkpoint.resume", str(error))) from error
        schedule = reconcile(schedule, resume_point.state["schedule"], config.checkpoint.scheduler_on_resume)
    trainer = Trainer(
        step=_step(config, parallel, objective, optimizers, policy, world),
        source=build_loader(config, budget, data, world),
        schedule=schedule,
        constant_weight_decay=constant_weight_decay(config),
        progress=Progress(samples_per_epoch=len(data.train), tokens_per_sample=data.tokens_per_sample),
        budget=budget,
        world=world,
        throughput=build_throughput(config, data, model, world),
        watchdog=Watchdog(
            config.distributed.timeout_seconds,
            world.rank,
            roll_call=roll_call(world, config.distributed.timeout_seconds),
            record=partial(_record_stall, run_dir),
        ),
        log_every_n_steps=config.tracking.log_every_n_steps,
        evaluation_interval=config.evaluation.interval_in(budget),
        evaluator=build_evaluator(config, data, parallel.model, objective, policy, world, run_dir),
        early_stopping=EarlyStopping(config.evaluation.early_stopping),
        pruning=Pruning.of(run_dir, world),
        best=Best(config.checkpoint.keep_best),
        checkpoints=_checkpoint_manager(
            config, config_hash, data, parallel, ema, optimizers, budget, run_dir, world, folder
        ),
        rank_flags=RankFlags(world),
        signals=SignalHandler(),
        ema=ema,
        max_rollbacks=config.guard.max_skips,
        save_final=config.checkpoint.save_final,
        explain_out_of_memory=partial(_explain_out_of_memory, config, parallel, ema, optimizers, world),
    )
    if resume_point is None:
        seed_rng(hparams.seed + 1 + world.rank)
    else:
        trainer.load_state_dict(resume_point.state)
        restore_rng(resume_point, world, hparams.seed)
    plan = _plan(config, budget, data, schedule, parallel, world)
    if world.is_main:
        _write_architecture(config, model, run_dir)
    return trainer, plan


def _record_stall(run_dir: Path, rank: int, reason: str, stack: str) -> None:
    leave_note(kind="Stalled", reason=reason, trace=stack, rank=rank, exit_code=EXIT_STALLED)
    record_end(run_dir, reason, stack)


def _step(
    config: Config,
    parallel: Parallel,
    objective: Objective,
    optimizers: Sequence[Optimizer],
    policy: PrecisionPolicy,
    world: World,
) -> TrainStep:
    return TrainStep(
        model=parallel.model,
        objective=objective,
        optimizers=optimizers,
        sync=parallel.sync,
        precision=policy,
        world=world,
        max_grad_norm=config.hparams.grad_clip_norm,
        guard=config.guard,
    )


def _explain_out_of_memory(
    config: Config,
    parallel: Parallel,
    ema: WeightAverage | None,
    optimizers: Sequence[Optimizer],
    world: World,
    error: BaseException,
    step: int,
) -> str:
    averages = () if ema is None else ema.average.values()
    memory = measure_device_memory(parallel.model, optimizers, world.device, averages=averages)
    return explain_out_of_memory(
        error, memory, config, strategy=parallel.strategy, step=step, rank=world.rank, world_size=world.world_size
    )


def _checkpoint_manager(
    config: Config,
    config_hash: str,
    data: DataSplits,
    parallel: Parallel,
    ema: WeightAverage | None,
    optimizers: Sequence[Optimizer],
    budget: Budget,
    run_dir: Path,
    world: World,
    folder: RunFolder | None,
) -> CheckpointManager:
    """What writes checkpoints, where any are wanted."""
    wanted = config.checkpoint
    if wanted.is_off:
        return NoCheckpoints()
    return ShardedCheckpointManager(
        checkpointer=Checkpointer(
            run_dir,
            world,
            asynchronous=wanted.asynchronous,
            keep_last=wanted.keep_last,
            keep_every_steps=wanted.keep_every,
            strict=wanted.strict_saves,
            locate=None if folder is None else folder.ensure,
        ),
        model=parallel.model,
        ema=ema,
        optimizers=optimizers,
        world=world,
        interval=wanted.interval_in(budget),
        every_minutes=wanted.every_minutes,
        facts={
            "config_hash": config_hash,
            "config": _recorded(config),
            "strategy": parallel.strategy.value,
            "data": data.identity(),
        },
    )


def _plan(
    config: Config, budget: Budget, data: DataSplits, schedule: Schedule, parallel: Parallel, world: World
) -> dict[str, Any]:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    return build_plan(
        config,
        budget,
        data,
        schedule,
        parallel.model,
        world_size=world.world_size,
        strategy=parallel.strategy.value,
        device=device,
    )


def _agree(world: World, run_dir: Path, config_hash: str, held: ExitStack) -> tuple[Path, str | None]:
    """Rank 0's run directory, which is held for this run, and the state of the run that it holds already, if any.

    Raises:
        ConfigError: the ranks composed different configurations, or another process trains in the run directory.
    """
    state, is_free = None, True
    if world.is_main:
        is_free = lock(run_dir, held)
        state = read_status(run_dir).get("state")
    said = gather((str(run_dir), config_hash, state, is_free), world)
    different = [rank for rank, (_, other, _, _) in enumerate(said) if other != said[0][1]]
    if different:
        raise ConfigError(
            Violation("configuration", f"of rank {different[0]} is not rank 0's; start every rank with the same words")
        )
    if not said[0][3]:
        message = f"is {said[0][0]}, where another process trains; wait for it, or choose another"
        raise ConfigError(Violation("hydra.run.dir", message))
    return Path(said[0][0]), said[0][2]


@contextmanager
def _rank_zero_missed(run_dir: Path, world: World) -> Iterator[None]:
    """Have the run said to have failed where rank 0, which would say so, was killed."""
    try:
        yield
    except CollectiveError as error:
        if not world.is_main:
            record_if_dead(run_dir, f"rank 0 is gone, killed perhaps; {error}")
        raise


@contextmanager
def _told(observers: Sequence[Observer]) -> Iterator[None]:
    """Tell the observers when the body fails or is interrupted; a refused configuration is no run to tell of."""
    try:
        yield
    except (ConfigError, SystemExit):  # Stopped is one, and so is submitit's way out of a job that it has queued again
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            ended = RunEnded(state="stopped", reason="interrupted", result={})
        else:
            first_line = next(iter(str(error).splitlines()), "")
            ended = RunEnded(state="failed", reason=f"{type(error).__name__}: {first_line}", result={})
        for observer in observers:
            observer.on_end(ended)
        raise
