"""`model.init_from`: weights of another run or another program, everything else from scratch."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.shard import DTYPES, local_chunks
from foundry.checkpoint.tensors import load_weights, tied_names
from foundry.checkpoint.verification import damage_together
from foundry.core.errors import ConfigError, Violation, listed
from foundry.core.model_hooks import hook
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST, find
from foundry.run_dir.names import CHECKPOINTS

_READ_TYPES = tuple(DTYPES[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16))
"""Types of weights that are read; another one, such as float8, is quantised."""


def init_from(path: Path, world: World, model: nn.Module, *, key: str = "model.init_from") -> None:
    """Give a model the weights that lie at a path; each rank reads what it holds of them.

    Nothing but weights is read: what a run's config.yaml names is not built. A checkpoint is first compared with the
    checksums of its manifest.

    Args:
        path: a run directory (its newest checkpoint), a checkpoint, a .safetensors file, or a folder of them as
            transformers writes it. Averaged weights are taken where a run kept them.
        world: all ranks call this together, and share the reading that checksums need.
        model: wrapped or not, or a part of one; under DDP the model inside.
        key: of the setting that says the path, for messages.

    Raises:
        ConfigError: there are no weights, they are damaged, or their names or shapes are not the model's.
    """
    try:
        if (checkpoint := find_checkpoint(path)) is not None:
            if wrong := damage_together(checkpoint, world):
                raise CheckpointError(f"{checkpoint.name} is not whole: {'; '.join(wrong)}")
            load_weights(checkpoint, model, ema=True, world=world)
            return
        files = weight_files(path)
        if not files:
            message = f"is {path}, which is no run, no checkpoint, and holds no .safetensors file"
            if not path.exists() and path.parent.name == CHECKPOINTS and path.parent.is_dir():
                message = f"is {path}, which is no longer there: its run, which still trains, has deleted it"
                message += " (checkpoint.keep_last); start again, or wait for its end"
            raise ConfigError(Violation(key, message))
        if misfit := compare_files(files, model):
            raise ConfigError(Violation(key, f"does not fit the model: {misfit}"))
        copy_files(files, model)
    except (OSError, CheckpointError) as error:
        raise ConfigError(Violation(key, f"is {path}: {error}")) from None


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path is, or of a run directory the newest; None for anything else.

    Raises:
        FileNotFoundError: a run directory has none.
    """
    if (path / MANIFEST).is_file():
        return path.resolve()  # `checkpoints/latest` is a link
    return find(path, "last") if (path / CHECKPOINTS).is_dir() else None


def weight_files(path: Path) -> list[Path]:
    """A .safetensors file, or those of a folder."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def compare_files(files: Iterable[Path], model: nn.Module) -> str:
    """Describe how names, shapes or types of .safetensors files do not fit a model; empty if all weights are there.

    Raises:
        CheckpointError: a file is none, or damaged.
    """
    wanted: dict[str, Tensor] = dict(model.state_dict())
    tied, buffers = tied_names(model), {name for name, _ in model.named_buffers()}
    unknown, misshapen, found = list[str](), list[str](), set[str]()
    for stored, name, slices in _stored(files, model):
        shape, dtype = tuple(slices.get_shape()), slices.get_dtype()
        if name not in wanted:
            unknown += [stored] if name not in tied else []
        elif shape != tuple(wanted[name].shape):
            misshapen.append(f"{stored} {shape} instead of {tuple(wanted[name].shape)}")
        elif dtype not in (*_READ_TYPES, DTYPES.get(wanted[name].dtype)):
            misshapen.append(f"{stored} as {dtype} instead of {', '.join(_READ_TYPES)}")
        found.add(name)
    missing = [name for name in wanted if name not in found | tied | buffers]
    wrong = [("lacks", missing), ("has besides", unknown), ("has", misshapen)]
    text = [f"{verb} {listed(names, 3)}" for verb, names in wrong if names]
    return f"it {'; it '.join(text)}" if text else ""


@torch.no_grad()
def copy_files(files: Iterable[Path], model: nn.Module) -> None:
    """Fill what this rank holds of a model from .safetensors files that fit it, a tensor at a time."""
    chunks = local_chunks(dict(model.state_dict()))
    for _, name, slices in _stored(files, model):
        if (chunk := chunks.get(name)) is not None:
            ranges = zip(chunk.offsets, chunk.local.shape, strict=True)
            chunk.local.copy_(slices[tuple(slice(start, start + size) for start, size in ranges)])


def _stored(files: Iterable[Path], model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Of each tensor in the files its name, the model's name for it, and what reads slices of it."""
    own_name = hook(model, "import_name") or (lambda name: name)
    for file in files:
        with _opened(file) as opened:
            for stored in opened.keys():  # noqa: SIM118 # an opened file is no mapping
                yield stored, own_name(stored), opened.get_slice(stored)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A .safetensors file.

    Raises:
        CheckpointError: it is none, or part of one.
    """
    try:
        if not file.is_file():
            raise CheckpointError(f"{file.name} is no regular file")
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise CheckpointError(f"{file.name} is no .safetensors file, or is damaged: {error}") from None
