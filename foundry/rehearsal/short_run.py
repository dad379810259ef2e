"""Shortened configurations, so that a rehearsal takes seconds."""

from dataclasses import replace
from typing import Any

from foundry.config.build import field_of
from foundry.config.schemas.distributed import DDP, resolve_distributed
from foundry.config.schemas.evaluation import EarlyStopping
from foundry.config.schemas.hparams import BatchRamp
from foundry.config.schemas.root import Config
from foundry.config.schemas.scheduler import Constant
from foundry.config.schemas.tracking import Profile
from foundry.core.errors import ConfigError, Violation

_LONGEST_WAIT_SECONDS = 10.0**6


def take_steps(config: Config, steps: int, world_size: int) -> tuple[Config, list[str]]:
    """Return the configuration with a budget of `steps` steps, and notes on settings that cannot be rehearsed.

    Args:
        config: configuration of the run.
        steps: number of the last optimizer step.
        world_size: number of ranks.

    Raises:
        ConfigError: if the strategy or the generation batch size cannot be rehearsed.
    """
    strategy = resolve_distributed(config.distributed, world_size)
    if isinstance(strategy, DDP) and not strategy.shard_optimizer and strategy.overlap_grad_reduce:
        message = "is true but DDP's gradient buckets do not work on fake ranks; set it to false for a rehearsal"
        raise ConfigError(Violation("distributed.overlap_grad_reduce", message))
    answers = field_of(config.objective, "num_prompts_per_step", 0) * field_of(
        config.objective, "num_generations_per_prompt", 1
    )
    if world_size > 1 and answers > (batch_size := field_of(config.objective, "generation_batch_size", answers)):
        message = (
            f"is {batch_size} but fake ranks cannot generate; set it to {answers}, all of a step, or rehearse one rank"
        )
        raise ConfigError(Violation("objective.generation_batch_size", message))
    notes = []
    if config.hparams.torchcompile:
        notes.append("hparams.torchcompile is false in the rehearsal: fake tensors cannot be compiled")
    hparams = replace(
        config.hparams, max_steps=steps, epochs=None, train_samples=None, max_minutes=None, torchcompile=False
    )
    tracking = replace(config.tracking, mlflow=False, plots=False, progress=False, trackers={}, profile=Profile())
    distributed = replace(config.distributed, timeout_seconds=_LONGEST_WAIT_SECONDS, start_timeout_seconds=None)
    checkpoint = replace(config.checkpoint, mirror=None)
    config = replace(config, hparams=hparams, distributed=distributed, tracking=tracking, checkpoint=checkpoint)
    return config, notes


def shorten(config: Config, world_size: int, *, saves: bool) -> Config:
    """Return the configuration with steps of full size, one evaluation of a microbatch per rank, and one checkpoint.

    The schedule and the batch size are constant, and the checkpoint depends on `saves`.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        saves: write a checkpoint at the end of the run, unless checkpoints are off; this rank's part has its real size.
    """
    samples = config.distributed.dp_size(world_size) * config.hparams.per_gpu_batch_size
    held_out = {name: node for name, node in config.evaluation.evaluators.items() if _is_held_out(node)}
    evaluation = replace(
        config.evaluation,
        interval=None,
        max_samples=samples,
        evaluators=held_out,
        metric="val_loss" if held_out else None,
        stop_rules={},
        write_samples=False,
        early_stopping=EarlyStopping(patience=None, metric=None, mode=config.evaluation.early_stopping.mode),
    )
    checkpoint = replace(
        config.checkpoint,
        interval=None,
        every_minutes=None,
        keep_best=replace(config.checkpoint.keep_best, metric=None),
        save_final=saves and not config.checkpoint.is_off,
    )
    hparams = replace(config.hparams, batch_ramp=BatchRamp(), batch_schedule=None)
    scheduler = Constant(warmup="0", horizon="1")  # in steps, so that the schedule is the same for a longer run
    return replace(config, hparams=hparams, scheduler=scheduler, evaluation=evaluation, checkpoint=checkpoint)


def _is_held_out(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("_target_", "")).endswith(".HeldOut")
