"""One run: the only place where the parts meet."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foundry.config.build import build
from foundry.config.duration import Budget, Interval
from foundry.config.errors import ConfigError, Violation
from foundry.config.frozen import plain, save_config
from foundry.config.lengths import budget_of, check_lengths
from foundry.config.root import Config
from foundry.data.loader import Loader
from foundry.data.order import GlobalOrder
from foundry.data.splits import DataSplits
from foundry.parallel.host_memory import keep_freed_memory
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World, process_group
from foundry.parallel.watchdog import Watchdog
from foundry.parallel.wrap import Parallel, parallelize
from foundry.planning.derive import PLAN, constant_weight_decay, phases_of, plan_of, selection_of, updates_of
from foundry.tracking.observers import build_observers
from foundry.training.checkpoint import save
from foundry.training.ema import WeightAverage
from foundry.training.evaluation import Evaluator
from foundry.training.events import Observer, RunEnded, RunStarted
from foundry.training.progress import Progress
from foundry.training.protocols import Objective, Schedule
from foundry.training.step import TrainStep
from foundry.training.throughput import Throughput
from foundry.training.trainer import Trainer

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
"""The tokenizer's file in a run directory, so that sampling and export need no training data."""


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
    """Train, on this process and those started with it.

    Args:
        config: the composed configuration; every rank has the same.
        run_dir: where rank 0 writes; the other ranks take rank 0's.

    Raises:
        ConfigError: the data or the machine shows a setting to be wrong; nothing has been trained.
        NonFiniteError: the loss or gradient became NaN or infinite.
    """
    config_hash = hash_config(config)
    with process_group(config.distributed) as world:
        if world.device.type == "cpu":
            keep_freed_memory()
        run_dir, state = _agree(world, run_dir, config_hash)
        if state is not None:
            return _earlier(run_dir, state)
        observers = build_observers(config.tracking, run_dir) if world.is_main else []
        with _told(observers):
            data = build_data(config)
            trainer, plan = _assemble(config, config_hash, data, run_dir, world)
            if world.is_main:
                _write_facts(config, plan, data, run_dir)
            trainer.observers = observers
            started = _started(config, config_hash, trainer, plan, run_dir)
            with trainer.watchdog:
                return RunResult(run_dir, trainer.fit(started))


def _started(config: Config, config_hash: str, trainer: Trainer, plan: dict[str, Any], run_dir: Path) -> RunStarted:
    schedule, budget = trainer.schedule, trainer.budget
    shown = selection_of(schedule, budget)
    return RunStarted(
        run_dir=run_dir,
        config=plain(config),
        config_hash=config_hash,
        plan=plan,
        updates=list(updates_of(schedule, budget, trainer.constant_weight_decay, shown)),
        phases=phases_of(schedule, budget),
    )


def _write_facts(config: Config, plan: dict[str, Any], data: DataSplits, run_dir: Path) -> None:
    """What a run directory holds from the start."""
    save_config(config, run_dir)
    (run_dir / PLAN).write_text(json.dumps(plan, indent=2) + "\n")
    if data.tokenizer is not None:
        data.tokenizer.save(str(run_dir / TOKENIZER))


def hash_config(config: Config) -> str:
    """SHA-256 of the configuration, in hexadecimal."""
    return hashlib.sha256(json.dumps(plain(config), sort_keys=True).encode()).hexdigest()


def build_model(config: Config) -> nn.Module:
    """The model with its initial weights, which depend on the seed only."""
    torch.manual_seed(config.hparams.seed)
    model: nn.Module = build(config.model)
    return model


def build_data(config: Config) -> DataSplits:
    """Training and held-out samples."""
    data: DataSplits = build(config.data, seed=config.hparams.seed)
    return data


def _assemble(
    config: Config, config_hash: str, data: DataSplits, run_dir: Path, world: World
) -> tuple[Trainer, dict[str, Any]]:
    """Build the parts and hand them to a trainer; also the numbers that follow from the configuration."""
    hparams, interval = config.hparams, config.evaluation.interval
    budget = build_budget(config, data, world.world_size)
    policy = PrecisionPolicy.from_config(config.precision, world.device)
    model = policy.prepare(build_model(config))
    parallel = parallelize(
        model,
        config.distributed,
        policy,
        world,
        grad_checkpointing=hparams.grad_checkpointing,
        torchcompile=hparams.torchcompile,
    )
    schedule = build_schedule(config, budget)
    plan = plan_of(
        config,
        budget,
        data,
        schedule,
        parallel.model,
        world_size=world.world_size,
        strategy=parallel.strategy.value,
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
    )
    torch.manual_seed(hparams.seed + 1 + world.rank)  # dropout differs between ranks
    ema = None if hparams.ema_decay is None else WeightAverage(parallel.inner, hparams.ema_decay)
    objective: Objective = build(config.objective)
    trainer = Trainer(
        step=TrainStep(
            model=parallel.model,
            objective=objective,
            optimizers=build(config.optimizer, model=parallel.model, lr=hparams.lr),
            sync=parallel.sync,
            precision=policy,
            world=world,
            max_grad_norm=hparams.grad_clip_norm,
        ),
        source=_loader(config, budget, data, world),
        schedule=schedule,
        constant_weight_decay=constant_weight_decay(config),
        progress=Progress(samples_per_epoch=len(data.train), tokens_per_sample=data.tokens_per_sample),
        budget=budget,
        world=world,
        throughput=Throughput(
            world_size=world.world_size,
            device=world.device,
            precision=config.precision.mode,
            flops_per_sample=_flops_per_sample(model, data),
            tokens_per_sample=data.tokens_per_sample,
        ),
        watchdog=Watchdog(config.distributed.timeout_seconds, world.rank),
        log_every_n_steps=config.tracking.log_every_n_steps,
        evaluation_interval=None if interval is None else Interval.parse(interval, budget),
        evaluator=Evaluator(
            model=parallel.model,
            objective=objective,
            data=data,
            precision=policy,
            world=world,
            per_gpu_batch_size=hparams.per_gpu_batch_size,
            max_samples=config.evaluation.max_samples,
            samples_dir=run_dir / "plots" if config.evaluation.write_samples else None,
        ),
        save=_saver(config, config_hash, parallel, ema, schedule, run_dir, world),
        ema=ema,
    )
    return trainer, plan


def build_budget(config: Config, data: DataSplits, world_size: int) -> Budget:
    """The size of the run.

    Raises:
        ConfigError: a length that only the data could resolve does not fit.
    """
    budget = budget_of(
        config.hparams,
        samples_per_epoch=len(data.train),
        world_size=world_size,
        tokens_per_sample=data.tokens_per_sample,
    )
    if wrong := list(check_lengths(config, budget)):
        raise ConfigError(wrong)
    return budget


def _loader(config: Config, budget: Budget, data: DataSplits, world: World) -> Loader:
    hparams = config.hparams
    return Loader(
        dataset=data.train,
        order=GlobalOrder(num_samples=len(data.train), fingerprint=data.fingerprint, seed=hparams.seed),
        batch_size_at=budget.batch_sizes.at,
        per_gpu_batch_size=hparams.per_gpu_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        num_workers=getattr(config.data, "num_workers", 0),
        pin_memory=world.device.type == "cuda",
    )


def build_schedule(config: Config, budget: Budget) -> Schedule:
    """Learning rate and weight decay along the run; says when that replaces the optimizer's own value."""
    own, start = constant_weight_decay(config), getattr(config.scheduler, "start_weight_decay", None)
    end = getattr(config.scheduler, "end_weight_decay", None)
    if start is not None and own not in (start, end):
        log.warning("optimizer.weight_decay=%g is not used: scheduler sets it from %g to %g", own, start, end)
    schedule: Schedule = build(config.scheduler, max_lr=config.hparams.lr, budget=budget)
    return schedule


def _saver(
    config: Config,
    config_hash: str,
    parallel: Parallel,
    ema: WeightAverage | None,
    schedule: Schedule,
    run_dir: Path,
    world: World,
) -> Callable[[Progress], Path] | None:
    """What writes a checkpoint, where one is wanted."""
    if not config.checkpoint.save_final:
        return None

    def save_now(progress: Progress) -> Path:
        manifest = {
            "samples": progress.samples,
            "tokens": progress.tokens,
            "config_hash": config_hash,
            "schedule": schedule.state_dict(),
        }
        return save(run_dir, progress.steps, model=parallel.model, ema=ema, manifest=manifest, world=world)

    return save_now


def _flops_per_sample(model: nn.Module, data: DataSplits) -> float | None:
    """Forward and backward FLOPs of one sample, where the model says them."""
    count = getattr(model, "flops_per_sample", None)
    if count is None:
        return None
    return float(count() if data.tokens_per_sample is None else count(data.tokens_per_sample))


def _agree(world: World, run_dir: Path, config_hash: str) -> tuple[Path, str | None]:
    """Rank 0's run directory, and the state of the run that it holds already, if any.

    Raises:
        ConfigError: the ranks composed different configurations.
    """
    status = run_dir / "status.json"
    state = json.loads(status.read_text())["state"] if world.is_main and status.is_file() else None
    said: list[Any] = [(str(run_dir), config_hash, state)]
    if world.world_size > 1:
        said *= world.world_size
        torch.distributed.all_gather_object(said, said[0])
    different = [rank for rank, (_, other, _) in enumerate(said) if other != said[0][1]]
    if different:
        raise ConfigError(
            Violation("configuration", f"of rank {different[0]} is not rank 0's; start every rank with the same words")
        )
    return Path(said[0][0]), said[0][2]


def _earlier(run_dir: Path, state: str) -> RunResult:
    """The result of the finished run that the run directory holds.

    Raises:
        ConfigError: it holds a run that did not finish.
    """
    if state != "finished":
        raise ConfigError(
            Violation("hydra.run.dir", f"is {run_dir}, which holds a run that is {state}; choose another")
        )
    log.warning("%s holds a finished run; choose another hydra.run.dir to train again", run_dir)
    return RunResult(run_dir, json.loads((run_dir / "result.json").read_text()))


@contextmanager
def _told(observers: Sequence[Observer]) -> Iterator[None]:
    """Tell the observers when the body fails or is interrupted; a refused configuration is no run to tell of."""
    try:
        yield
    except ConfigError:
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
