"""Named tensors of a checkpoint: weights, averaged weights and optimizer states, independent of model wrappers.

Tensors are named `model.<name>`, `ema.<name>` and `optimizer.<name>.<key>`, where <name> is the parameter's name. An
optimizer's state for all parameters of a group is named `optimizer_groups.<name>.<key>` after the first parameter of
the group, and tensors of the window source are named `source.<name>`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError, read_manifest
from foundry.checkpoint.optimizer_state import allocate_state, collect_state, describe_state
from foundry.checkpoint.shard import local_chunks
from foundry.checkpoint.tensor_index import TensorIndex, read_index
from foundry.core.ema import WeightAverage
from foundry.parallel.process_group import World

_MAX_NAMES = 3
_SOURCE = "source."


def collect(
    model: nn.Module,
    ema: WeightAverage | None,
    optimizers: Sequence[Optimizer],
    source: Mapping[str, Tensor] | None = None,
    *,
    trained_only: bool = False,
) -> dict[str, Tensor]:
    """Return the tensors to save, by name, without copying them.

    Sharded tensors stay sharded, and a tied tensor is returned once.

    Args:
        model: the wrapped model.
        ema: the averaged weights; None if the run does not average weights.
        optimizers: all optimizers of the run.
        source: tensors of the window source, equal on all ranks.
        trained_only: skip frozen weights and buffers, which are stored elsewhere.

    Raises:
        CheckpointError: if the state of an optimizer cannot be saved, or could not be read with another sharding.
    """
    inner = _inner(model)
    weights = {f"model.{name}": tensor for name, tensor in _weights(inner, trained_only).items()}
    source_tensors = {f"{_SOURCE}{name}": tensor for name, tensor in (source or {}).items()}
    return weights | _averages(ema) | collect_state(inner, optimizers) | source_tensors


def describe(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the part of the optimizer states that is not in the tensors of `collect`, as JSON for the manifest.

    Raises:
        CheckpointError: if a state cannot be saved.
    """
    return describe_state(_inner(model), optimizers)


def restore_into(
    folder: Path,
    model: nn.Module,
    ema: WeightAverage | None,
    optimizers: Sequence[Optimizer],
    *,
    trained_only: bool = False,
    world: World | None = None,
) -> None:
    """Replace weights, averaged weights and optimizer states by a checkpoint's; each rank reads its own shards.

    The checkpoint may have been written by another number of ranks, with another wrapper.

    Args:
        folder: the checkpoint.
        model: the wrapped model.
        ema: the averaged weights; None if the run does not average weights. The caller restores the number of updates,
            which is not a tensor.
        optimizers: optimizers of this model's parameters; their current state is replaced.
        trained_only: as in `collect`.
        world: all its ranks call this function together, and rank 0 reads the index for all of them; with None each
            process reads the index itself.

    Raises:
        CheckpointError: if the tensors of the checkpoint and of this run differ in name or shape.
    """
    index = read_index(folder, world)
    saved_shapes = index.shapes()
    inner = _inner(model)
    weights = {f"model.{name}": tensor for name, tensor in _weights(inner, trained_only).items()}
    states = allocate_state(inner, optimizers, saved_shapes, read_manifest(folder).optimizer)
    targets = weights | _averages(ema)
    for state in states:
        targets |= state.tensors
    _check_names(folder, targets, [name for name in saved_shapes if not name.startswith(_SOURCE)])
    _read(index, targets)
    _accept(inner, weights)
    for optimizer in optimizers:
        optimizer.state.clear()
    for state in states:
        state.accept()


def read_source_tensors(folder: Path, world: World | None = None) -> dict[str, Tensor]:
    """Return the tensors of the window source in host memory, unsharded; empty if the source saved no tensors.

    Args:
        folder: the checkpoint.
        world: as in `restore_into`.
    """
    index = read_index(folder, world)
    names = [name for name in index.entries if name.startswith(_SOURCE)]
    targets = {name: torch.empty(index.shape(name), dtype=index.dtype(name)) for name in names}
    _read(index, targets)
    return {name.removeprefix(_SOURCE): tensor for name, tensor in targets.items()}


def load_weights(
    folder: Path, model: nn.Module, *, ema: bool = False, trained_only: bool = False, world: World | None = None
) -> None:
    """Read a checkpoint's weights into a model; each rank reads its own shards.

    The checkpoint may have been written by another number of ranks.

    Args:
        folder: the checkpoint.
        model: a model of the same configuration; its tensors are filled in place, so no second copy is allocated.
        ema: read averaged weights instead of the model's own weights if the checkpoint has them; buffers are never
            averaged.
        trained_only: as in `collect`.
        world: as in `restore_into`.

    Raises:
        CheckpointError: if the names or shapes of the weights in the checkpoint differ from the model's.
    """
    weights = _weights(model, trained_only)
    index, stored_names = find_weights(folder, weights, ema=ema, world=world)
    targets = {stored_names[name]: tensor for name, tensor in weights.items()}
    with readable(folder):
        _read(index, targets)
    _accept(model, targets)


def require_shapes(folder: Path, model: nn.Module, *, trained_only: bool = False) -> None:
    """Check that a checkpoint has the weights of a model in the same shapes, for a model without allocated memory.

    Args:
        folder: the checkpoint.
        model: the model; its parameters may be on the meta device.
        trained_only: as in `collect`.

    Raises:
        CheckpointError: if the names or shapes of the weights in the checkpoint differ from the model's.
    """
    weights = _weights(model, trained_only)
    index, stored_names = find_weights(folder, weights, ema=False)
    with readable(folder):
        _require_shapes(index, {stored_names[name]: tensor for name, tensor in weights.items()})


def find_weights(
    folder: Path, names: Iterable[str], *, ema: bool, world: World | None = None
) -> tuple[TensorIndex, dict[str, str]]:
    """Return the tensor index of a checkpoint and, for each weight of a model, its name in the checkpoint.

    Args:
        folder: the checkpoint.
        names: names of all weights that a checkpoint of the model has; tied weights are listed once.
        ema: use averaged weights if the checkpoint has them.
        world: as in `restore_into`.

    Raises:
        CheckpointError: if the checkpoint lacks weights of the model or has additional ones.
    """
    names = list(names)
    with readable(folder):
        index = read_index(folder, world)
        saved = [name for name in index.entries if name.startswith("model.")]
    _check_names(folder, [f"model.{name}" for name in names], saved)
    averaged = {name for name in names if ema and f"ema.{name}" in index.entries}
    return index, {name: f"{'ema' if name in averaged else 'model'}.{name}" for name in names}


def tied_names(inner: nn.Module) -> set[str]:
    """Return all names of tied parameters except the first of each.

    A tied parameter is saved once, under its first name.
    """
    return set(first_names(inner))


def first_names(inner: nn.Module) -> dict[str, str]:
    """Return the names from `tied_names`, each mapped to the first name of its parameter."""
    first: dict[nn.Parameter, str] = {}
    parameters = inner.named_parameters(remove_duplicate=False)
    return {
        name: first_name for name, parameter in parameters if (first_name := first.setdefault(parameter, name)) != name
    }


def _inner(model: nn.Module) -> nn.Module:
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


def compute_digest(model: nn.Module) -> str:
    """Return the 128-bit XXH3 digest, in hexadecimal, of the names and weights of an unwrapped model on the CPU."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(_weights(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _weights(inner: nn.Module, trained_only: bool = False) -> dict[str, Tensor]:
    """Return parameters and buffers, tied ones once; with `trained_only`, only the trainable parameters.

    They come from `state_dict`, which makes FSDP2 reshard gathered parameters.
    """
    state, excluded = inner.state_dict(), tied_names(inner)
    if trained_only:
        trained = {name for name, parameter in inner.named_parameters() if parameter.requires_grad}
        excluded |= state.keys() - trained
    return {name: tensor for name, tensor in state.items() if name not in excluded}


def _averages(ema: WeightAverage | None) -> dict[str, Tensor]:
    return {} if ema is None else {f"ema.{name}": tensor for name, tensor in ema.average.items()}


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Convert errors in reading the tensors of a verified checkpoint to a one-line `CheckpointError`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CheckpointError(f"{folder} has no readable tensors: {lines[-1] if lines else error!r}") from error


def _check_names(folder: Path, expected: Iterable[str], saved: Iterable[str]) -> None:
    expected, saved = set(expected), set(saved)
    for names, text in ((expected - saved, "lacks"), (saved - expected, "has, but this run does not,")):
        if names:
            names_text = ", ".join(sorted(names)[:_MAX_NAMES])
            suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise CheckpointError(f"{folder} {text} {names_text}{suffix}")


def _read(index: TensorIndex, targets: Mapping[str, Tensor]) -> None:
    """Fill the target tensors in place."""
    _require_shapes(index, targets)
    index.fill(local_chunks(targets))


def _require_shapes(index: TensorIndex, targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        if target.shape != (shape := index.shape(name)):
            raise CheckpointError(
                f"{index.folder} has {name} with shape {tuple(shape)}, this run with {tuple(target.shape)}"
            )


def _accept(inner: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Pass the weights that were read to `load_state_dict`, for models whose `state_dict` returned copies."""
    inner.load_state_dict({name.partition(".")[2]: tensor for name, tensor in weights.items()}, strict=False)
