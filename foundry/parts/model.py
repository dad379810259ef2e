"""Builders of models, including models whose weights each rank initializes or reads for itself."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.init_from import compare_files, copy_files, weight_files
from foundry.checkpoint.shard import local_chunks
from foundry.config.build import build, field_of, weights_of_parts
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, listed
from foundry.core.model_hooks import hook
from foundry.core.sharded import is_fake
from foundry.models.attention.documents import isolates_documents
from foundry.models.initialisation import InitialModel, matrices_on_meta
from foundry.models.keyed_draws import Draw, Part, draw_parts
from foundry.models.logits import answer_with_log_probs

log = logging.getLogger(__name__)

_TILE = "logprob_tile_tokens"
"""Name of a model's argument for the number of positions whose logits are computed at a time."""


def build_model(config: Config, node: Any = None) -> nn.Module:
    """Build a model with its initial weights in host memory: of its transformers folder, or random from the seed.

    The weights in `init_from` are not read here.

    Args:
        config: configuration of the run.
        node: configuration of another model; None builds the run's model.

    Raises:
        ConfigError: the objective sets dropout, but the model does not support it.
    """
    return start_model(config, node).materialize()


def start_model(config: Config, node: Any = None) -> InitialModel:
    """Build a model and, if the model supports it, a function that later fills the weights of one rank's shards only.

    The function reads the transformers folder in `node`, or initializes weights at random. If `node` has `init_from`,
    the model is left as its constructor builds it.

    Args:
        config: configuration of the run.
        node: configuration of another model; None builds the run's model.

    Raises:
        ConfigError: the objective sets dropout, but the model does not support it.
    """
    node = config.model if node is None else node
    if is_fake(torch.empty(0)):
        return InitialModel(_construct(config, node))
    if resolve_init_from(node) is not None:
        return InitialModel(build_empty(config, node))
    if isinstance(node, HuggingFace) and node.path is not None:
        model, files = build_empty(config, node), weight_files(Path(node.path).expanduser())
        with suppress(CheckpointError):  # reported by transformers in more detail
            if files and not compare_files(files, model):
                return InitialModel(model, partial(copy_files, files))
        return InitialModel(_construct(config, node))
    initial = draw_weights(build_empty(config, node), config.hparams.seed, without=weights_of_parts(node))
    has_values = initial.fill is not None or not any(parameter.is_meta for parameter in initial.model.parameters())
    return initial if has_values else InitialModel(_construct(config, node))


def build_empty(config: Config, node: Any = None) -> nn.Module:
    """Build a model whose weights are loaded later; see `unfilled`.

    Raises:
        ConfigError: as `build_model`.
    """
    node = config.model if node is None else node
    with unfilled(node):
        return _construct(config, node, **({"read_weights": False} if isinstance(node, HuggingFace) else {}))


def unfilled(node: Any) -> AbstractContextManager[None]:
    """Return a context manager for building a model whose weights are loaded later.

    If the model's class has `initial_weights`, matrices are built on the meta device. Other classes are built as usual,
    and fake tensors stay fake.
    """
    by_name = False
    with suppress(ImportError, AttributeError, ValueError):  # building the model reports an import error
        by_name = hasattr(resolve_name(field_of(node, "_target_")), "initial_weights")
    return matrices_on_meta() if by_name and not is_fake(torch.empty(0)) else nullcontext()


def draw_weights(model: nn.Module, seed: int, *, without: Iterable[str] = ()) -> InitialModel:
    """Return a model and, if it has `initial_weights`, the function that initializes its weights later.

    Args:
        model: the unwrapped model.
        seed: seed of the weights.
        without: names of submodules that the function skips, since their weights are read from files.

    Raises:
        ConfigError: `initial_weights` does not cover all parameters on the meta device.
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
    """Initialize this rank's part of the parameters of a model, which may be wrapped."""
    parameters = dict(model.named_parameters())
    chunks = local_chunks(parameters).items()
    parts = {name: Part(chunk.local, tuple(parameters[name].shape), chunk.offsets) for name, chunk in chunks}
    draw_parts(draws, parts, seed)


def _construct(config: Config, node: Any, **given: Any) -> nn.Module:
    """Build the model with its constructor, after setting torch's seed."""
    torch.manual_seed(config.hparams.seed)
    target = field_of(node, "_target_")
    size = field_of(config.objective, "logprob_chunk_size")
    tile = {} if size is None or not _takes(target, _TILE) else {_TILE: size}
    model = build(node, **_dropouts(config.objective, target), **tile, **given)
    if not isinstance(model, nn.Module):
        message = f"returns an object of type {type(model).__name__} but must return a torch.nn.Module"
        raise ConfigError(Violation("model._target_", message))
    vocab_size = field_of(config.data, "vocab_size")
    add_log_probs(model, config.objective, vocab_size, tile_tokens=0 if tile or size is None else size)
    return model.train()  # transformers returns models in eval mode


def add_log_probs(model: nn.Module, objective: Any, vocab_size: int | None, *, tile_tokens: int = 0) -> None:
    """Make a model that returns logits return log-probabilities, if the objective reads them and the model has no loss.

    Args:
        model: changed in place.
        objective: group `objective` of the configuration.
        vocab_size: vocabulary size of the data; None uses all columns of the logits.
        tile_tokens: number of positions whose logits are computed at a time; 0 computes all at once, unless the model's
            constructor has this setting.

    Raises:
        ConfigError: `tile_tokens` is set but cannot be applied.
    """
    target = field_of(objective, "_target_")
    reads_them = target is not None and getattr(get_object(target), "reads_log_probs", False)
    if reads_them and "token_loss" not in inspect.signature(model.forward).parameters:
        answer_with_log_probs(model, tile_tokens=tile_tokens, vocab_size=vocab_size)
    elif tile_tokens:
        message = f"is {tile_tokens} but the model, {type(model).__name__}, has no argument {_TILE}; set it to null"
        raise ConfigError(Violation("objective.logprob_chunk_size", message))


def _dropouts(objective: Any, target: str) -> dict[str, Any]:
    """Return the model's dropout arguments from the objective's settings.

    Raises:
        ConfigError: the model does not accept one of them.
    """
    given = {name: field_of(objective, name) for name in ("hidden_dropout", "attention_dropout")}
    given = {name: value for name, value in given.items() if value is not None}
    takes = inspect.signature(get_object(target)).parameters if given else {}
    if wrong := [name for name in given if name not in takes]:
        message = (
            f"but the model, {target}, does not take this argument; set it to null to use the dropout of the model"
        )
        raise ConfigError(Violation(f"objective.{name}", f"is {given[name]} {message}") for name in wrong)
    return given


def _takes(target: str, name: str) -> bool:
    """Return True if a constructor has a parameter of this name."""
    return name in inspect.signature(get_object(target)).parameters


def resolve_init_from(node: Any) -> Path | None:
    """Return the path in `init_from` of a model's settings, which custom models may have too; None if not set."""
    path = field_of(node, "init_from")
    return None if path is None else Path(path)


def resolve_packing(data: Any, model: nn.Module, name: str = "model") -> int | None:
    """Return the number of tokens of a packed row; None if packing is off, or the model mixes samples of a row.

    Args:
        data: group `data` of the configuration.
        model: the run's model or a frozen one, not yet wrapped; it is tested with two short documents.
        name: name of the model in messages.

    Raises:
        ConfigError: packing is on, but the model's forward() does not accept `documents`.
    """
    if not field_of(data, "packing", False):
        return None
    parameters = inspect.signature(model.forward).parameters
    if "documents" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        message = f"is true but the {name} is {type(model).__name__}, whose forward() does not take documents"
        raise ConfigError(Violation("data.packing", f"{message}; set it to false, or choose model=transformer"))
    if not isolates_documents(model):
        message = "data.packing is off: the log-probabilities of the %s depend on the other documents in a row"
        log.warning(message, name)
        return None
    return int(field_of(data, "seq_len"))
