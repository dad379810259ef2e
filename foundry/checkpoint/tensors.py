"""What a checkpoint holds of a run: weights, their average and the optimizers' state, under names no wrapper changes.

`model.<name>`, `ema.<name>` and `optimizer.<name>.<key>`, where <name> is the parameter's own;
`optimizer_groups.<optimizer>.<group>.<key>` where an optimizer keeps something for all parameters of a group; and
`source.<name>` for what the source of windows keeps in tensors.
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

_NUM_SHOWN = 3
_SOURCE = "source."


def collect(
    model: nn.Module,
    ema: WeightAverage | None,
    optimizers: Sequence[Optimizer],
    source: Mapping[str, Tensor] | None = None,
    *,
    trained_only: bool = False,
) -> dict[str, Tensor]:
    """The tensors themselves, no copies; sharded ones stay sharded, a tied one comes once.

    Args:
        model: as it was wrapped.
        ema: the averaged weights, where kept.
        optimizers: all of the run.
        source: tensors of the source of windows, equal on all ranks.
        trained_only: of the weights, those that are trained; the rest lies elsewhere.

    Raises:
        CheckpointError: an optimizer's state that another layout could not read.
    """
    inner = _inner(model)
    weights = {f"model.{name}": tensor for name, tensor in _weights(inner, trained_only).items()}
    others = {f"{_SOURCE}{name}": tensor for name, tensor in (source or {}).items()}
    return weights | _averages(ema) | collect_state(inner, optimizers) | others


def describe(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What the manifest has to say of the optimizers' state besides the tensors that `collect` gives.

    Raises:
        CheckpointError: state that cannot be saved.
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
    """Read what `collect` gave, whatever number of ranks and wrapper wrote it; every rank reads its own part.

    Args:
        folder: the checkpoint.
        model: as it is wrapped now.
        ema: the averaged weights, where kept; how many updates they have seen is not a tensor, and the caller's.
        optimizers: over this model's parameters; whatever state they have is replaced.
        trained_only: as in `collect`.
        world: all its ranks call this together, and rank 0 finds out for all where tensors are; None: each by itself.

    Raises:
        CheckpointError: the checkpoint lacks tensors of this run, has others, or has them in another shape.
    """
    index = read_index(folder, world)
    saved = index.shapes()
    inner = _inner(model)
    weights = {f"model.{name}": tensor for name, tensor in _weights(inner, trained_only).items()}
    states = allocate_state(inner, optimizers, saved, read_manifest(folder).optimizer)
    targets = weights | _averages(ema)
    for held in states:
        targets |= held.tensors
    _check_names(folder, targets, [name for name in saved if not name.startswith(_SOURCE)])
    _read(index, targets)
    _accept(inner, weights)
    for optimizer in optimizers:
        optimizer.state.clear()
    for held in states:
        held.accept()


def read_source_tensors(folder: Path, world: World | None = None) -> dict[str, Tensor]:
    """The tensors of the source of windows, whole and in host memory; none for a source that has none.

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
    """Read a checkpoint's weights into a model, whatever number of ranks wrote it; each rank reads its own part.

    Args:
        folder: the checkpoint.
        model: a model of the same configuration; its own tensors are filled, so that there is no second copy.
        ema: read the averaged weights instead of the model's own, where there are any; buffers are the model's own.
        trained_only: as in `collect`.
        world: as in `restore_into`.

    Raises:
        CheckpointError: the checkpoint lacks weights of the model, has others, or has them in another shape.
    """
    weights = _weights(model, trained_only)
    index, stored = find_weights(folder, weights, ema=ema, world=world)
    targets = {stored[name]: tensor for name, tensor in weights.items()}
    with readable(folder):
        _read(index, targets)
    _accept(model, targets)


def require_shapes(folder: Path, model: nn.Module, *, trained_only: bool = False) -> None:
    """Check that a checkpoint has a model's weights in the model's shapes, for a model that has no memory yet.

    Args:
        folder: the checkpoint.
        model: its parameters may be on the meta device.
        trained_only: as in `collect`.

    Raises:
        CheckpointError: the checkpoint lacks weights of the model, has others, or has them in another shape.
    """
    weights = _weights(model, trained_only)
    index, stored = find_weights(folder, weights, ema=False)
    with readable(folder):
        _require_shapes(index, {stored[name]: tensor for name, tensor in weights.items()})


def find_weights(
    folder: Path, names: Iterable[str], *, ema: bool, world: World | None = None
) -> tuple[TensorIndex, dict[str, str]]:
    """Where a checkpoint has a model's weights, and under which names it does.

    Args:
        folder: the checkpoint.
        names: of all that a checkpoint of the model has, a tied one once.
        ema: take the averaged weights where there are any.
        world: as in `restore_into`.

    Raises:
        CheckpointError: the checkpoint lacks weights of the model, or has others.
    """
    names = list(names)
    with readable(folder):
        index = read_index(folder, world)
        saved = [name for name in index.entries if name.startswith("model.")]
    _check_names(folder, [f"model.{name}" for name in names], saved)
    averaged = {name for name in names if ema and f"ema.{name}" in index.entries}
    return index, {name: f"{'ema' if name in averaged else 'model'}.{name}" for name in names}


def tied_names(inner: nn.Module) -> set[str]:
    """Second and further names of one parameter: it is saved once, under its first, as safetensors demands."""
    return set(first_names(inner))


def first_names(inner: nn.Module) -> dict[str, str]:
    """The names that `tied_names` gives, each with the first of its parameter."""
    first: dict[nn.Parameter, str] = {}
    named = inner.named_parameters(remove_duplicate=False)
    return {name: kept for name, parameter in named if (kept := first.setdefault(parameter, name)) != name}


def _inner(model: nn.Module) -> nn.Module:
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


def compute_digest(model: nn.Module) -> str:
    """XXH3 of 128 bits, in hexadecimal, of a model's weights and their names; it is on the CPU and not wrapped."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(_weights(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _weights(inner: nn.Module, trained_only: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers, each once. Asked for its state, FSDP2 reshards whatever is gathered."""
    state, left_out = inner.state_dict(), tied_names(inner)
    if trained_only:
        trained = {name for name, parameter in inner.named_parameters() if parameter.requires_grad}
        left_out |= state.keys() - trained
    return {name: tensor for name, tensor in state.items() if name not in left_out}


def _averages(ema: WeightAverage | None) -> dict[str, Tensor]:
    return {} if ema is None else {f"ema.{name}": tensor for name, tensor in ema.average.items()}


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Say in a line what is wrong with files that are as their manifest says, and no tensors."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CheckpointError(
            f"{folder} holds no tensors that can be read: {lines[-1] if lines else error!r}"
        ) from error


def _check_names(folder: Path, wanted: Iterable[str], saved: Iterable[str]) -> None:
    wanted, saved = set(wanted), set(saved)
    for names, text in ((wanted - saved, "lacks"), (saved - wanted, "holds, and this run does not,")):
        if names:
            shown = ", ".join(sorted(names)[:_NUM_SHOWN])
            more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
            raise CheckpointError(f"{folder} {text} {shown}{more}")


def _read(index: TensorIndex, targets: Mapping[str, Tensor]) -> None:
    """Fill the targets in place."""
    _require_shapes(index, targets)
    index.fill(local_chunks(targets))


def _require_shapes(index: TensorIndex, targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        if target.shape != (shape := index.shape(name)):
            raise CheckpointError(f"{index.folder} has {name} as {tuple(shape)}, this run as {tuple(target.shape)}")


def _accept(inner: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the model what was read, for one whose state is no view of its tensors."""
    inner.load_state_dict({name.partition(".")[2]: tensor for name, tensor in weights.items()}, strict=False)
