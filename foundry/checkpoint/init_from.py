"""`model.init_from`: weights of another run or another program, everything else from scratch."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from foundry.checkpoint.folder import CheckpointError
from foundry.checkpoint.tensors import load_weights, tied_names
from foundry.checkpoint.verification import damage_together
from foundry.config.errors import ConfigError, Violation, listed
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST, find
from foundry.run_dir.names import CHECKPOINTS
from foundry.training.model_hooks import hook

_KEY = "model.init_from"


def init_from(model: nn.Module, path: Path, world: World) -> None:
    """Give a model, not yet wrapped, the weights that lie at a path; a tensor at a time is in memory besides.

    Nothing but weights is read: what a run's config.yaml names is not built. A checkpoint is first compared with the
    checksums of its manifest.

    Args:
        model: as its constructor left it, on the CPU.
        path: a run directory (its newest checkpoint), a checkpoint, a .safetensors file, or a folder of them as
            transformers writes it. Averaged weights are taken where a run kept them.
        world: all ranks call this together, and share the reading that checksums need.

    Raises:
        ConfigError: there are no weights, they are damaged, or their names or shapes are not the model's.
    """
    try:
        if (checkpoint := find_checkpoint(path)) is not None:
            if wrong := damage_together(checkpoint, world):
                raise CheckpointError(f"{checkpoint.name} is not whole: {'; '.join(wrong)}")
            load_weights(checkpoint, model, ema=True)
            return
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            message = f"is {path}, which is no run, no checkpoint, and holds no .safetensors file"
            if not path.exists() and path.parent.name == CHECKPOINTS and path.parent.is_dir():
                message = f"is {path}, which is no longer there: its run, which still trains, has deleted it"
                message += " (checkpoint.keep_last); start again, or wait for its end"
            raise ConfigError(Violation(_KEY, message))
        _copy_from(files, model)
    except (OSError, CheckpointError) as error:
        raise ConfigError(Violation(_KEY, f"is {path}: {error}")) from None


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path is, or of a run directory the newest; None for anything else.

    Raises:
        FileNotFoundError: a run directory has none.
    """
    if (path / MANIFEST).is_file():
        return path.resolve()  # `checkpoints/latest` is a link
    return find(path, "last") if (path / CHECKPOINTS).is_dir() else None


@torch.no_grad()
def _copy_from(files: Iterable[Path], model: nn.Module) -> None:
    wanted: dict[str, Tensor] = dict(model.state_dict())
    own_name = hook(model, "import_name") or (lambda name: name)
    unknown = list[str]()
    misshapen = list[str]()
    found = set[str]()
    for file in files:
        with _opened(file) as opened:
            for stored in opened.keys():  # noqa: SIM118 # an opened file is no mapping
                name = own_name(stored)
                if name not in wanted:
                    unknown.append(stored)
                elif (shape := tuple(opened.get_slice(stored).get_shape())) != tuple(wanted[name].shape):
                    misshapen.append(f"{stored} {shape} instead of {tuple(wanted[name].shape)}")
                else:
                    wanted[name].copy_(opened.get_tensor(stored))
                    found.add(name)
    tied = tied_names(model)
    buffers = {name for name, _ in model.named_buffers()}
    missing = [name for name in wanted if name not in found | tied | buffers]
    wrong = [("lacks", missing), ("has besides", [n for n in unknown if own_name(n) not in tied]), ("has", misshapen)]
    text = [f"{verb} {listed(names, 3)}" for verb, names in wrong if names]
    if text:
        raise ConfigError(Violation(_KEY, f"does not fit the model: it {'; it '.join(text)}"))


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
