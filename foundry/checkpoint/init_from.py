"""Implementation of `model.init_from`: initialize only the weights, from another run or another program's files."""

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
from foundry.checkpoint.verification import find_damage_on_all_ranks
from foundry.core.errors import ConfigError, Violation, listed
from foundry.core.model_hooks import hook
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST, find
from foundry.run_dir.names import CHECKPOINTS

_READ_TYPES = tuple(DTYPES[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16))
"""Dtypes of weights that a model of any dtype can read; weights of other dtypes, such as float8, may be quantized."""


def init_from(path: Path, world: World, model: nn.Module, *, key: str = "model.init_from") -> None:
    """Load the weights at a path into a model; each rank reads its own shards.

    Only weights are read; parts in the run's config.yaml are not instantiated. The files of a checkpoint are first
    compared with the checksums in its manifest.

    Args:
        path: a run directory (its newest checkpoint is used), a checkpoint, a .safetensors file, or a folder of them in
            transformers' format. Averaged weights are used if a checkpoint has them.
        world: all its ranks call this function together and divide the verification of checksums among themselves.
        model: a model or a part of one, wrapped or not; for DDP, the inner module.
        key: config key of the path, for error messages.

    Raises:
        ConfigError: if the path has no weights, they are damaged, or names, shapes or dtypes do not fit the model.
    """
    try:
        if (checkpoint := find_checkpoint(path)) is not None:
            if damage := find_damage_on_all_ranks(checkpoint, world):
                raise CheckpointError(f"{checkpoint.name} is damaged: {'; '.join(damage)}")
            load_weights(checkpoint, model, ema=True, world=world)
            return
        files = weight_files(path)
        if not files:
            message = f"is {path}, which is not a run or a checkpoint, and has no .safetensors file"
            if not path.exists() and path.parent.name == CHECKPOINTS and path.parent.is_dir():
                message = f"is {path}, which no longer exists: its run is still training and has deleted it"
                message += " (checkpoint.keep_last); start again, or wait until that run ends"
            raise ConfigError(Violation(key, message))
        if mismatch := compare_files(files, model):
            raise ConfigError(Violation(key, f"does not fit the model: {mismatch}"))
        copy_files(files, model)
    except (OSError, CheckpointError) as error:
        raise ConfigError(Violation(key, f"is {path}: {error}")) from None


def find_checkpoint(path: Path) -> Path | None:
    """Return the path itself if it is a checkpoint, the newest checkpoint if it is a run directory, otherwise None.

    Raises:
        FileNotFoundError: if the run directory has no checkpoint.
    """
    if (path / MANIFEST).is_file():
        return path.resolve()  # resolves the symlink `checkpoints/latest`
    return find(path, "last") if (path / CHECKPOINTS).is_dir() else None


def weight_files(path: Path) -> list[Path]:
    """Return the .safetensors files in a folder; if `path` is a file, a list of `path` only."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def compare_files(files: Iterable[Path], model: nn.Module) -> str:
    """Describe how names, shapes or dtypes in .safetensors files differ from a model; empty if they match.

    Raises:
        CheckpointError: if a file is damaged or is not a .safetensors file.
    """
    expected: dict[str, Tensor] = dict(model.state_dict())
    aliases, buffers = tied_names(model), {name for name, _ in model.named_buffers()}
    unknown, mismatches, seen = list[str](), list[str](), set[str]()
    for stored_name, name, slices in _read_slices(files, model):
        shape, dtype = tuple(slices.get_shape()), slices.get_dtype()
        if name not in expected:
            unknown += [stored_name] if name not in aliases else []
        elif shape != tuple(expected[name].shape):
            mismatches.append(f"{stored_name} {shape} instead of {tuple(expected[name].shape)}")
        elif dtype not in (*_READ_TYPES, DTYPES.get(expected[name].dtype)):
            mismatches.append(f"{stored_name} as {dtype} instead of {', '.join(_READ_TYPES)}")
        seen.add(name)
    missing = [name for name in expected if name not in seen | aliases | buffers]
    groups = [("lacks", missing), ("has unknown", unknown), ("has", mismatches)]
    text = [f"{verb} {listed(names, 3)}" for verb, names in groups if names]
    return f"it {'; it '.join(text)}" if text else ""


@torch.no_grad()
def copy_files(files: Iterable[Path], model: nn.Module) -> None:
    """Fill a model's tensors, or this rank's shards, from .safetensors files that `compare_files` accepts."""
    chunks = local_chunks(dict(model.state_dict()))
    for _, name, slices in _read_slices(files, model):
        if (chunk := chunks.get(name)) is not None:
            ranges = zip(chunk.offsets, chunk.local.shape, strict=True)
            chunk.local.copy_(slices[tuple(slice(start, start + size) for start, size in ranges)])


def _read_slices(files: Iterable[Path], model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield for each tensor its name in the file, its name in the model, and the safetensors slice that reads it."""
    model_name = hook(model, "import_name") or (lambda name: name)
    for file in files:
        with _open(file) as reader:
            for stored_name in reader.keys():  # noqa: SIM118 # an opened file is not a mapping
                yield stored_name, model_name(stored_name), reader.get_slice(stored_name)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a .safetensors file.

    Raises:
        CheckpointError: if the file is damaged or is not a .safetensors file.
    """
    try:
        if not file.is_file():
            raise CheckpointError(f"{file.name} is not a regular file")
        with safe_open(file, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise CheckpointError(f"{file.name} is not a .safetensors file or is damaged: {error}") from None
