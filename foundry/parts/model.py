"""Models: built, or started so that each rank draws or reads its own weights."""

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
from foundry.models.documents import isolates_documents
from foundry.models.initialisation import InitialModel, matrices_on_meta
from foundry.models.keyed_draws import Draw, Part, draw_parts
from foundry.models.logits import answer_with_log_probs

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
    vocab_size = field_of(config.data, "vocab_size")
    add_log_probs(model, config.objective, vocab_size, tile_tokens=0 if tile or size is None else size)
    return model.train()  # transformers hands over what it reads from a folder without dropout


def add_log_probs(model: nn.Module, objective: Any, vocab_size: int | None, *, tile_tokens: int = 0) -> None:
    """Let a model answer with logits where the objective reads log-probabilities; one that computes the loss does not.

    Args:
        model: changed in place.
        objective: the group of the configuration.
        vocab_size: of the data; None: all columns of the logits.
        tile_tokens: positions whose logits exist at a time, of which the constructor has not been told; 0: all.

    Raises:
        ConfigError: nobody can heed `tile_tokens`.
    """
    target = field_of(objective, "_target_")
    reads_them = target is not None and getattr(get_object(target), "reads_log_probs", False)
    if reads_them and "token_loss" not in inspect.signature(model.forward).parameters:
        answer_with_log_probs(model, tile_tokens=tile_tokens, vocab_size=vocab_size)
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


def resolve_init_from(node: Any) -> Path | None:
    """Where a model's initial weights come from, if from anywhere; a user's own model may say it too."""
    path = field_of(node, "init_from")
    return None if path is None else Path(path)


def resolve_packing(data: Any, model: nn.Module, name: str = "model") -> int | None:
    """Tokens of a row that holds several samples; None: each has its own row, or the model would mix them.

    Args:
        data: the group of the configuration.
        model: the run's or one that it is compared with, not yet wrapped; it is asked about two short documents.
        name: what it is.

    Raises:
        ConfigError: samples are to share rows, and the model's forward() does not take `documents`.
    """
    if not field_of(data, "packing", False):
        return None
    parameters = inspect.signature(model.forward).parameters
    if "documents" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        message = f"is true but the {name} is {type(model).__name__}, whose forward() does not take documents"
        raise ConfigError(Violation("data.packing", f"{message}; set it to false, or choose model=transformer"))
    if not isolates_documents(model):
        message = "data.packing is off: in one row with another document, the %s computes other log-probabilities"
        log.warning(message, name)
        return None
    return int(field_of(data, "seq_len"))
