"""What a checkpoint holds of a run: weights, their average and the optimizers' state, under names no wrapper changes.

`model.<name>`, `ema.<name>` and `optimizer.<name>.<key>`, where <name> is the parameter's own;
`optimizer_groups.<optimizer>.<group>.<key>` where an optimizer keeps something for all parameters of a group; and
`source.<name>` for what the source of windows keeps in tensors.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError, read_manifest
from foundry.checkpoint.optimizer_state import allocate_state, collect_state, describe_state
from foundry.training.ema import WeightAverage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
) -> None:
    """Read what `collect` gave, whatever number of ranks and wrapper wrote it; every rank reads its own part.

    Args:
        folder: the checkpoint.
        model: as it is wrapped now.
        ema: the averaged weights, where kept; how many updates they have seen is not a tensor, and the caller's.
        optimizers: over this model's parameters; whatever state they have is replaced.
        trained_only: as in `collect`.

    Raises:
        CheckpointError: the checkpoint lacks tensors of this run, has others, or has them in another shape.
    """
    reader, saved = _open(folder)
    inner = _inner(model)
    weights = {f"model.{name}": tensor for name, tensor in _weights(inner, trained_only).items()}
    states = allocate_state(inner, optimizers, saved, read_manifest(folder).optimizer)
    targets = weights | _averages(ema)
    for held in states:
        targets |= held.tensors
    _check_names(folder, targets, [name for name in saved if not name.startswith(_SOURCE)])
    _read(folder, reader, targets, saved)
    _accept(inner, weights)
    for optimizer in optimizers:
        optimizer.state.clear()
    for held in states:
        held.accept()


def read_source_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the source of windows, whole and in host memory; none for a source that has none."""
    reader = _build_reader(folder)
    found = {name: entry for name, entry in _entries(reader).items() if name.startswith(_SOURCE)}
    targets = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
    _read(folder, reader, targets, {name: entry.size for name, entry in found.items()})
    return {name.removeprefix(_SOURCE): tensor for name, tensor in targets.items()}


def load_weights(folder: Path, model: nn.Module, *, ema: bool = False, trained_only: bool = False) -> None:
    """Read a checkpoint's weights into an unwrapped model on one process, whatever number of ranks wrote it.

    Args:
        folder: the checkpoint.
        model: a model of the same configuration; its own tensors are filled, so that there is no second copy.
        ema: read the averaged weights instead of the model's own, where there are any; buffers are the model's own.
        trained_only: as in `collect`.

    Raises:
        CheckpointError: the checkpoint lacks weights of the model, has others, or has them in another shape.
    """
    weights = _weights(model, trained_only)
    with _readable(folder):
        reader, saved = _open(folder)
    _check_names(folder, [f"model.{name}" for name in weights], [name for name in saved if name.startswith("model.")])
    averaged = {name for name in weights if ema and f"ema.{name}" in saved}
    targets = {f"{'ema' if name in averaged else 'model'}.{name}": tensor for name, tensor in weights.items()}
    with _readable(folder):
        _read(folder, reader, targets, saved)
    _accept(model, targets)


def tied_names(inner: nn.Module) -> set[str]:
    """Second and further names of one parameter: it is saved once, under its first, as safetensors demands."""
    first: dict[nn.Parameter, str] = {}
    named = inner.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if first.setdefault(parameter, name) != name}


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


def _build_reader(folder: Path) -> "HuggingFaceStorageReader":
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # a run from scratch reads nothing

    return HuggingFaceStorageReader(str(folder))


def _open(folder: Path) -> "tuple[HuggingFaceStorageReader, dict[str, torch.Size]]":
    """The reader of a checkpoint, and the shapes of its tensors by name."""
    reader = _build_reader(folder)
    return reader, {name: entry.size for name, entry in _entries(reader).items()}


def _entries(reader: "HuggingFaceStorageReader") -> "dict[str, TensorStorageMetadata]":
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Say in a line what is wrong with files that are as their manifest says, and no tensors."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (SafetensorError, CheckpointException, ValueError, LookupError, TypeError, AttributeError) as error:
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


def _read(
    folder: Path, reader: "HuggingFaceStorageReader", targets: Mapping[str, Tensor], saved: Mapping[str, torch.Size]
) -> None:
    """Fill the targets in place."""
    from torch.distributed.checkpoint.state_dict_loader import load

    for name, target in targets.items():
        if target.shape != saved[name]:
            raise CheckpointError(f"{folder} has {name} as {tuple(saved[name])}, this run as {tuple(target.shape)}")
    with warnings.catch_warnings():
        # Each rank plans and reads alone: what it needs follows from its layout.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(targets), storage_reader=reader, no_dist=True)


def _accept(inner: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the model what was read, for one whose state is no view of its tensors."""
    inner.load_state_dict({name.partition(".")[2]: tensor for name, tensor in weights.items()}, strict=False)
