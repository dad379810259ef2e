"""Building the parts of a run from its configuration."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object
from torch import nn
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.init_from import compare_files, copy_files, weight_files
from foundry.checkpoint.shard import local_chunks
from foundry.config.build import build, field_of, weights_of_parts
from foundry.config.duration import Budget
from foundry.config.errors import ConfigError, Violation, first_line, listed
from foundry.config.lengths import check_lengths, resolve_budget
from foundry.config.metrics import check_metrics, val_metric_names
from foundry.config.schemas.evaluation import PatienceUnit
from foundry.config.schemas.hparams import ScheduleUnit
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.root import Config
from foundry.config.schemas.scheduler import Scheduler
from foundry.config.targets import runtime_settings
from foundry.data.splits import DataSplits
from foundry.environments.judge import Judge
from foundry.evaluators.drawn_samples import DrawnSamples
from foundry.models.documents import isolates_documents
from foundry.models.initialisation import InitialModel, matrices_on_meta
from foundry.models.keyed_draws import Draw, Part, draw_parts
from foundry.models.logits import answer_with_log_probs
from foundry.optim.optimizers import not_covered
from foundry.parallel.process_group import World
from foundry.simulators.protocol import Simulator
from foundry.training.early_stopping import EarlyStopping
from foundry.training.model_hooks import hook
from foundry.training.protocols import Evaluator, GenerativeObjective, Objective, Schedule, StopRule
from foundry.training.sharded import is_fake

log = logging.getLogger(__name__)

_TILE = "logprob_tile_tokens"
"""A model's argument for the positions whose logits exist at a time."""


def build_model(config: Config, node: Any = None) -> nn.Module:
    """A model with its initial weights, in host memory, which depend on the seed only; `init_from` is not read here.

    Args:
        config: of the run.
        node: of another model than the run's.

    Raises:
        ConfigError: the objective wants dropout, and the model takes none.
    """
    return start_model(config, node).whole()


def start_model(config: Config, node: Any = None) -> InitialModel:
    """A model and its initial weights, which each rank draws or reads for itself where the model says how.

    Weights are those of the folder of transformers that `node` names, failing that drawn; of a node with `init_from`
    nothing is drawn, and what constructors give is all.

    Args:
        config: of the run.
        node: of another model than the run's.

    Raises:
        ConfigError: the objective wants dropout, and the model takes none.
    """
    node = config.model if node is None else node
    if is_fake(torch.empty(0)):
        return InitialModel(_construct(config, node))
    if resolve_init_from(node) is not None:
        return InitialModel(build_empty(config, node))
    if isinstance(node, HuggingFace) and node.path is not None:
        model, files = build_empty(config, node), weight_files(Path(node.path).expanduser())
        with suppress(CheckpointError):  # which transformers says in its own words
            if files and not compare_files(files, model):
                return InitialModel(model, partial(copy_files, files))
        return InitialModel(_construct(config, node))
    initial = drawn(build_empty(config, node), config.hparams.seed, without=weights_of_parts(node))
    has_values = initial.fill is not None or not any(parameter.is_meta for parameter in initial.model.parameters())
    return initial if has_values else InitialModel(_construct(config, node))


def build_empty(config: Config, node: Any = None) -> nn.Module:
    """A model whose weights come from elsewhere; see `unfilled`.

    Raises:
        ConfigError: as `build_model`.
    """
    node = config.model if node is None else node
    with unfilled(node):
        return _construct(config, node, **({"read_weights": False} if isinstance(node, HuggingFace) else {}))


def unfilled(node: Any) -> AbstractContextManager[None]:
    """Where a model is built to get its weights later: on the meta device, if its class says how they are drawn.

    Matrices of another class are what its constructor makes of them, and fakes stay fakes.
    """
    by_name = False
    with suppress(ImportError, AttributeError, ValueError):  # building the model explains what is not there
        by_name = hasattr(resolve_name(field_of(node, "_target_")), "initial_weights")
    return matrices_on_meta() if by_name and not is_fake(torch.empty(0)) else nullcontext()


def drawn(model: nn.Module, seed: int, *, without: Iterable[str] = ()) -> InitialModel:
    """A model with the weights that are drawn from scratch; those that it has, where it does not say how.

    Args:
        model: not wrapped.
        seed: of what is drawn.
        without: names of parts that get their weights from elsewhere.

    Raises:
        ConfigError: it says how, but not of all that have no numbers.
    """
    ask = hook(model, "initial_weights")
    draws: Mapping[str, Draw] | None = None if ask is None else ask()
    if draws is None:
        return InitialModel(model)
    if missing := [name for name, p in model.named_parameters() if p.is_meta and name not in draws]:
        message = f"is {type(model).__name__}, whose initial_weights() lacks {listed(missing, 3)}; name every matrix"
        raise ConfigError(Violation("model._target_", message))
    elsewhere = tuple(f"{name}." for name in without)
    draws = {name: draw for name, draw in draws.items() if not name.startswith(elsewhere)}
    return InitialModel(model, partial(_draw, draws, seed))


def _draw(draws: Mapping[str, Draw], seed: int, model: nn.Module) -> None:
    """Draw what this rank holds of a model, wrapped or not."""
    parameters = dict(model.named_parameters())
    chunks = local_chunks(parameters).items()
    parts = {name: Part(chunk.local, tuple(parameters[name].shape), chunk.offsets) for name, chunk in chunks}
    draw_parts(draws, parts, seed)


def _construct(config: Config, node: Any, **given: Any) -> nn.Module:
    """The model as its constructor makes it, with torch's generator at the seed."""
    torch.manual_seed(config.hparams.seed)
    target = field_of(node, "_target_")
    size = field_of(config.objective, "logprob_chunk_size")
    tile = {} if size is None or not _takes(target, _TILE) else {_TILE: size}
    model: nn.Module = build(node, **_dropouts(config.objective, target), **tile, **given)
    add_log_probs(config, model, tile_tokens=0 if tile or size is None else size)
    return model.train()  # transformers hands over what it reads from a folder without dropout


def add_log_probs(config: Config, model: nn.Module, *, tile_tokens: int = 0) -> None:
    """Let a model answer with logits where the objective reads log-probabilities; one that computes the loss does not.

    Args:
        config: of the run.
        model: changed in place.
        tile_tokens: positions whose logits exist at a time, of which the constructor has not been told; 0: all.

    Raises:
        ConfigError: nobody can heed `tile_tokens`.
    """
    target = field_of(config.objective, "_target_")
    reads_them = target is not None and getattr(get_object(target), "reads_log_probs", False)
    if reads_them and "token_loss" not in inspect.signature(model.forward).parameters:
        answer_with_log_probs(model, tile_tokens=tile_tokens, vocab_size=field_of(config.data, "vocab_size"))
    elif tile_tokens:
        message = f"is {tile_tokens} but the model, {type(model).__name__}, has no argument {_TILE}; set it to null"
        raise ConfigError(Violation("objective.logprob_chunk_size", message))


def _dropouts(objective: Any, target: str) -> dict[str, Any]:
    """The model's arguments for dropout that the objective's settings give.

    Raises:
        ConfigError: it does not take one.
    """
    given = {name: field_of(objective, name) for name in ("hidden_dropout", "attention_dropout")}
    given = {name: value for name, value in given.items() if value is not None}
    takes = inspect.signature(get_object(target)).parameters if given else {}
    if wrong := [name for name in given if name not in takes]:
        message = f"but the model, {target}, has no such argument; set it to null, which leaves dropout to the model"
        raise ConfigError(Violation(f"objective.{name}", f"is {given[name]} {message}") for name in wrong)
    return given


def _takes(target: str, name: str) -> bool:
    """Whether a constructor has a parameter of this name."""
    return name in inspect.signature(get_object(target)).parameters


def samples_per_epoch(config: Config, data: DataSplits) -> int:
    """Samples of one pass over the training data: of an objective that generates, several for each row."""
    return len(data.train) * int(field_of(config.objective, "samples_per_row", 1))


def constant_weight_decay(config: Config) -> float:
    """The weight decay where the schedule has none: the optimizer's; 0 for an optimizer without one."""
    return float(field_of(config.optimizer, "weight_decay") or 0.0)


def resolve_init_from(node: Any) -> Path | None:
    """Where a model's initial weights come from, if from anywhere; a user's own model may say it too."""
    path = field_of(node, "init_from")
    return None if path is None else Path(path)


def build_data(config: Config) -> DataSplits:
    """Training and held-out samples."""
    data: DataSplits = build(_fitting(config.data, "data"), offered=offered_to_data(config), seed=config.hparams.seed)
    return data


def offered_to_data(config: Config) -> dict[str, Any]:
    """What data is given where it takes it: what makes the simulator, and its settings."""
    return {"simulator": simulator_factory(config), "simulator_settings": _simulator_settings(config)}


def build_simulator(config: Config) -> Simulator | None:
    """Where the policy acts; None where nothing is simulated.

    Raises:
        ConfigError: it cannot be built, or has other sizes than the configuration says.
    """
    if field_of(config.simulator, "_target_") is None:
        return None
    settings = _simulator_settings(config)
    simulator: Simulator = build(_fitting(settings, "simulator"))
    stated = {name: settings.get(name) for name in ("state_dim", "action_dim")}
    built = {name: getattr(simulator, name) for name in stated}
    if wrong := [name for name, size in stated.items() if size not in (None, built[name])]:
        simulator.close()
        message = f"but {type(simulator).__name__} has %s; set it to that"
        raise ConfigError(
            Violation(f"simulator.{name}", f"is {stated[name]} {message % built[name]}") for name in wrong
        )
    return simulator


def _simulator_settings(config: Config) -> dict[str, Any]:
    node = config.simulator
    return node if isinstance(node, dict) else asdict(node)


def simulator_factory(config: Config) -> Callable[[], Simulator] | None:
    """What makes a simulator at each call, as `build_simulator` does; None where nothing is simulated."""

    def make() -> Simulator:
        simulator = build_simulator(config)
        assert simulator is not None
        return simulator

    return None if field_of(config.simulator, "_target_") is None else make


def build_objective(config: Config, world: World | None = None, tokenizer: Any = None) -> Objective:
    """What is minimised; given ranks, tokenizer, and if there are adapters where it takes it; no frozen models."""
    offered = {"world": world, "tokenizer": tokenizer, "has_adapters": isinstance(config.peft, LoRA)}
    objective: Objective = build(config.objective, offered=offered)
    return objective


def check_forward(objective: Objective, model: nn.Module, key: str = "model") -> None:
    """Refuse a model whose forward() lacks a keyword that the objective calls it with, its `forward_keywords`.

    Args:
        objective: what is minimised.
        model: not yet wrapped.
        key: of the settings that the model is built from.

    Raises:
        ConfigError: it lacks one.
    """
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if missing := [name for name in getattr(objective, "forward_keywords", ()) if name not in parameters]:
        needs = f"objective {type(objective).__name__} calls it with {' and '.join(missing)}"
        message = f"is {type(model).__name__}, whose forward() does not take what {needs}; pass it on to read_log_probs"
        raise ConfigError(Violation(key, message))


def resolve_packing(config: Config, model: nn.Module, name: str = "model") -> int | None:
    """Tokens of a row that holds several samples; None: each has its own row, or the model would mix them.

    Args:
        config: of the run.
        model: the run's or one that it is compared with, not yet wrapped; it is asked about two short documents.
        name: what it is.

    Raises:
        ConfigError: samples are to share rows, and the model's forward() does not take `documents`.
    """
    if not field_of(config.data, "packing", False):
        return None
    parameters = inspect.signature(model.forward).parameters
    if "documents" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        message = f"is true but the {name} is {type(model).__name__}, whose forward() does not take documents"
        raise ConfigError(Violation("data.packing", f"{message}; set it to false, or choose model=transformer"))
    if not isolates_documents(model):
        message = "data.packing is off: in one row with another document, the %s computes other log-probabilities"
        log.warning(message, name)
        return None
    return int(field_of(config.data, "seq_len"))


def build_evaluators(
    config: Config, objective: Objective, data: DataSplits, judge: Judge | None = None
) -> dict[str, Evaluator]:
    """What measures the model during the run, and what draws samples, by name.

    Raises:
        ConfigError: they say what they measure, and a setting chooses another metric.
    """
    evaluators, measured = dict[str, Evaluator](), list[str]()
    are_known = True
    for name, node in config.evaluation.evaluators.items():
        if node is None:
            continue
        try:
            evaluator = _build_for_evaluation(config, objective, data, node, judge)
        except InstantiationException as error:
            if "torchmetrics" not in node:
                raise  # of the user's own: shown where it came from
            raise ConfigError(Violation(f"evaluation.evaluators.{name}", first_line(str(error)))) from error
        names = node["metrics"] if "metrics" in node else getattr(evaluator, "metrics", None)
        are_known = are_known and names is not None
        measured += val_metric_names(names or ())
        evaluators[name] = evaluator
    if are_known and (wrong := list(check_metrics(config, dict.fromkeys(measured)))):
        raise ConfigError(wrong)
    if config.evaluation.write_samples and isinstance(objective, GenerativeObjective):
        if data.tokens_per_sample is not None and data.tokenizer is None:
            log.warning("no samples are drawn: the data has tokens and no tokenizer (data.tokenizer)")
            return evaluators
        evaluators["drawn_samples"] = DrawnSamples(objective=objective, data=data)
    return evaluators


def build_stop_rules(
    config: Config, objective: Objective, data: DataSplits, judge: Judge | None = None
) -> dict[str, StopRule]:
    """What may end the run early, by name."""
    own = [(name, node) for name, node in config.evaluation.stop_rules.items() if node is not None]
    rules: dict[str, StopRule] = {"early_stopping": EarlyStopping(config.evaluation.early_stopping)}
    return rules | {name: _build_for_evaluation(config, objective, data, node, judge) for name, node in own}


def _build_for_evaluation(
    config: Config, objective: Objective, data: DataSplits, node: Mapping[str, Any], judge: Judge | None
) -> Any:
    """An evaluator or a stop rule; the names of its metrics are for the run, unless it takes them."""
    offered = {
        "objective": objective,
        "data": data,
        "tokenizer": data.tokenizer,
        "judge": judge,
        "simulator": simulator_factory(config),
        "seed": config.hparams.seed,
        "per_gpu_batch_size": config.hparams.per_gpu_batch_size,
        "max_samples": config.evaluation.max_samples,
        "metrics": node.get("metrics"),
    }
    return build({name: value for name, value in node.items() if name != "metrics"}, offered=offered)


def build_budget(config: Config, data: DataSplits, dp_size: int) -> Budget:
    """The size of the run.

    Raises:
        ConfigError: a length that only the data could resolve does not fit.
    """
    hparams, tokens = config.hparams, data.tokens_per_sample
    if hparams.batch_schedule is not None and hparams.batch_schedule_unit is ScheduleUnit.tokens and tokens is None:
        message = "is tokens but a sample of this data has none; set samples"
        raise ConfigError(Violation("hparams.batch_schedule_unit", message))
    try:
        epoch = samples_per_epoch(config, data)
        budget = resolve_budget(hparams, samples_per_epoch=epoch, dp_size=dp_size, tokens_per_sample=tokens)
    except ValueError as error:
        # Thresholds in tokens of data that says only now how many a sample has.
        raise ConfigError(Violation("hparams.batch_schedule", str(error))) from None
    if wrong := list(check_lengths(config, budget)):
        raise ConfigError(wrong)
    stopping, epochs = config.evaluation.early_stopping, budget.total_samples / budget.samples_per_epoch
    if stopping.patience is not None and stopping.unit is PatienceUnit.epochs and epochs <= stopping.patience:
        patience = f"evaluation.early_stopping.patience={stopping.patience} epochs"
        log.warning("%s is not shorter than the run, which has %.3g", patience, epochs)
    return budget


def build_schedule(config: Config, budget: Budget) -> Schedule:
    """Learning rate and weight decay along the run; says what of the settings it does not follow."""
    own = constant_weight_decay(config)
    start = getattr(config.scheduler, "start_weight_decay", None)
    end = getattr(config.scheduler, "end_weight_decay", None)
    if start is not None and own not in (start, end):
        log.warning("optimizer.weight_decay=%g is not used: scheduler sets it from %g to %g", own, start, end)
    if isinstance(config.scheduler, Scheduler) and (phases := config.scheduler.phases(budget)).is_clamped:
        steps = budget.batch_sizes.steps_at(phases.warmup)
        log.warning("scheduler.warmup=%s is longer than the run; it is %g steps", config.scheduler.warmup, steps)
    schedule: Schedule = build(_fitting(config.scheduler, "scheduler"), max_lr=config.hparams.lr, budget=budget)
    return schedule


def build_optimizers(config: Config, model: nn.Module) -> list[Optimizer]:
    """The optimizers of the wrapped model, which take each of its trainable parameters once.

    Raises:
        ConfigError: they leave some out, or take some twice; or they are no list of optimizers.
    """
    offered = {"precision": config.precision.mode}
    optimizers = build(config.optimizer, offered=offered, model=model, lr=config.hparams.lr)
    if wrong := not_covered(optimizers, model):
        target = field_of(config.optimizer, "_target_")
        raise ConfigError(Violation("optimizer._target_", f"is {target}, which {wrong}"))
    return list(optimizers)


def _fitting(node: Any, group: str) -> Any:
    """A part of the user's own, without the settings that are the run's or the presets' and that it does not take."""
    optional = [name for name in runtime_settings(group) if isinstance(node, dict) and name in node]
    if not optional:
        return node
    try:
        parameters = inspect.signature(get_object(node["_target_"]), follow_wrapped=False).parameters
    except ValueError:  # compiled code, which does not say
        return node
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return node
    untaken = [name for name in optional if name not in parameters]
    for name in untaken:
        if group == "scheduler":
            log.info("scheduler.%s=%s is not used: %s takes none", name, node[name], node["_target_"])
    return {name: value for name, value in node.items() if name not in untaken}
