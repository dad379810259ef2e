"""The trained model with optimizers, averages and objective, at their initial or restored values."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.resume_point import ResumePoint, check_base
from foundry.checkpoint.tensors import compute_digest, restore_into
from foundry.config.build import field_of, weights_of_parts
from foundry.config.schemas.hparams import CheckpointingPolicy
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.root import Config
from foundry.core.duration import Budget
from foundry.core.ema import WeightAverage
from foundry.core.errors import ConfigError, Violation
from foundry.core.model_hooks import hook
from foundry.core.protocols import Objective, RunContext, Schedule
from foundry.data.corpora.tokenizer import check_same
from foundry.data.splits import DataSplits
from foundry.engine.columns import join_columns
from foundry.engine.initial_model import Base, adapt, read_initial, read_parts, resolve_weights
from foundry.models.attention.documents import knows_documents
from foundry.models.initialisation import InitialModel
from foundry.models.lora import frozen_matrices
from foundry.optim.schedule_state import reconcile
from foundry.parallel.compilation import require_compiler
from foundry.parallel.wrap import Parallel, parallelize, place_frozen
from foundry.parts.model import build_empty, build_model, resolve_packing, start_model
from foundry.parts.objective import build_objective, check_forward
from foundry.parts.optimization import build_budget, build_optimizers, build_schedule

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The trained model and the parts needed for its training.

    Attributes:
        unwrapped: model as built.
        base: base of the adapters; None if the whole model is trained.
        parallel: wrapped model.
        optimizers: optimizers that cover the trainable parameters.
        ema: averaged weights; None if not kept.
        objective: the loss.
        frozen: frozen models that the objective uses in each step, by name.
        schedule: learning rate and weight decay of each update.
        budget: length of the run.
        pack_tokens: tokens of a packed row; None gives each sample its own row.
    """

    unwrapped: nn.Module
    base: Base | None
    parallel: Parallel
    optimizers: Sequence[Optimizer]
    ema: WeightAverage | None
    objective: Objective
    frozen: Mapping[str, nn.Module]
    schedule: Schedule
    budget: Budget
    pack_tokens: int | None


def build_trained(run: RunContext) -> Trained:
    """Build the model with its optimizers and averages, at their initial or restored values."""
    config, world = run.config, run.world
    hparams, budget = config.hparams, build_budget(config, run.data, world.dp_size)
    if hparams.torchcompile:
        require_compiler(world.device)
    if world.world_size > 1:
        from foundry.planning.fits import check_fits  # a single process needs no check, since it shards no gradients

        check_fits(config, run.data, world)
    initial = _build_trainable(run)
    model = initial.model
    base = adapt(model, run, resolve_weights(config.model))
    if run.resume_point is not None and base is not None:
        check_base(run.resume_point, base.facts(), config.checkpoint.on_changed_config)
    pack_tokens = resolve_packing(config.data, model)
    parallel = _wrap(initial, run)
    optimizers = build_optimizers(config, parallel.model)
    ema = None if hparams.ema_decay is None else WeightAverage(parallel.inner, hparams.ema_decay)
    objective = build_objective(config.objective, config.peft, world, run.data.tokenizer)
    check_forward(objective, model)
    frozen, can_pack = _build_frozen(run, objective)
    trained = Trained(
        unwrapped=model,
        base=base,
        parallel=parallel,
        optimizers=optimizers,
        ema=ema,
        objective=objective,
        frozen=frozen,
        schedule=build_schedule(config, budget),
        budget=budget,
        pack_tokens=pack_tokens if can_pack else None,
    )
    return trained if run.resume_point is None else _restore(trained, run.resume_point, run)


def _build_trainable(run: RunContext) -> InitialModel:
    """Return the model to train with its initial weights, or without them if a checkpoint has all weights."""
    if isinstance(run.config.peft, LoRA):  # adapters need the base weights, whose digest is computed
        initial = InitialModel(_build_initial(run, None).materialize())
    elif run.resume_point is None:
        initial = _build_initial(run, None)
    else:
        initial = _build_without_weights(run.config)
    training_warning = hook(initial.model, "training_warning")
    if training_warning is not None and (line := training_warning()) is not None:
        log.warning(line)
    return initial


def _wrap(initial: InitialModel, run: RunContext) -> Parallel:
    """Return the model in the types of the run's precision, wrapped for all ranks."""
    model, hparams = initial.model, run.config.hparams
    return parallelize(
        run.precision.prepare(model, frozen_matrices(model) if run.config.peft.narrows_base else ()),
        run.precision,
        run.world,
        grad_checkpointing=hparams.grad_checkpointing,
        torchcompile=hparams.torchcompile,
        selective_checkpointing=hparams.grad_checkpointing_policy is CheckpointingPolicy.selective,
        fill=initial.fill,
    )


def _restore(trained: Trained, resume_point: ResumePoint, run: RunContext) -> Trained:
    """Restore weights, averages and optimizers from a checkpoint, and continue its schedule.

    Raises:
        ConfigError: the checkpoint does not match the parts.
    """
    try:
        restore_into(
            resume_point.folder,
            trained.parallel.model,
            trained.ema,
            trained.optimizers,
            trained_only=trained.base is not None,
            world=run.world,
        )
    except CheckpointError as error:
        raise ConfigError(Violation("checkpoint.resume", str(error))) from error
    setting = run.config.checkpoint.scheduler_on_resume
    with resume_point.reading():
        return replace(trained, schedule=reconcile(trained.schedule, resume_point.state["schedule"], setting))


def _build_without_weights(config: Config) -> InitialModel:
    """Return the model of a run, uninitialized since its checkpoint has the weights."""
    return _with_values(InitialModel(build_empty(config)), config.data, partial(build_model, config))


def _with_values(initial: InitialModel, data: Any, build: Callable[[], nn.Module]) -> InitialModel:
    """Return the model of `build` if the test of the model's packing support needs weights; else `initial`."""
    needs_weights = field_of(data, "packing", False) and not knows_documents(initial.model)
    return InitialModel(build()) if needs_weights else initial


def _build_initial(run: RunContext, node: Any, key: str | None = None) -> InitialModel:
    """Return a model with its initial weights.

    `node` selects another model than the run's, and `key` is its config key.
    """
    node = run.config.model if node is None else node
    path, tokenizer = resolve_weights(node), run.data.tokenizer
    if path is not None and tokenizer is not None:
        check_same(tokenizer, path, None if node is run.config.model else key)
    initial = read_initial(node, path, partial(start_model, run.config), run.world, "model.init_from")
    if path is None:  # weights of the whole model take precedence over `init_from` of its parts
        for weights in weights_of_parts(node).values() if tokenizer is not None else ():
            check_same(tokenizer, Path(weights).expanduser())
        initial = read_parts(initial, node, run.world)
    return _with_values(initial, run.config.data, initial.materialize)


def _build_frozen(run: RunContext, objective: Objective) -> tuple[Mapping[str, nn.Module], bool]:
    """Return the frozen models that the objective uses in each step, and whether all of them support packing."""
    if objective.compare is None or objective.columns:
        return {}, True
    models = {name: _build_initial(run, node, f"objective.{name}") for name, node in objective.frozen_models.items()}
    can_pack = [resolve_packing(run.config.data, initial.model, name) is not None for name, initial in models.items()]
    frozen = {name: _place_frozen(initial, run) for name, initial in models.items()}
    objective.compare(frozen)
    return frozen, all(can_pack)


def _place_frozen(initial: InitialModel, run: RunContext) -> nn.Module:
    return place_frozen(run.precision.prepare(initial.model), run.precision, run.world, fill=initial.fill)


def join_samples(run: RunContext, objective: Objective) -> DataSplits:
    """Return the data, with the columns that the objective precomputes with frozen models."""
    if not objective.columns:
        return run.data

    def build_frozen() -> tuple[Mapping[str, nn.Module], str]:
        models = {
            name: _build_initial(run, node, f"objective.{name}").materialize()
            for name, node in objective.frozen_models.items()
        }
        digest = " ".join(f"{name} {compute_digest(model)}" for name, model in models.items())
        return {name: _place_frozen(InitialModel(m), run) for name, m in models.items()}, digest

    return join_columns(objective, build_frozen, run)
