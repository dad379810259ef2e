"""The initial model of a run: random weights or the weights of a base, and adapters if configured.

Adapters are added after the base has its weights and before the model is wrapped; their initial weights depend only on
the seed. Checkpoints of a run with adapters contain only the adapters. When the run is resumed or opened, the base is
read again, and compared with the digest in the run's checkpoints.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from foundry.checkpoint.folder import CheckpointError, Manifest, read_manifest
from foundry.checkpoint.init_from import find_checkpoint, init_from
from foundry.checkpoint.tensors import compute_digest, load_weights
from foundry.checkpoint.verification import find_damage_on_all_ranks
from foundry.config.build import weights_of_parts
from foundry.config.record.frozen import typed_group
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.peft import LoRA
from foundry.config.setting import check_fields
from foundry.core.errors import ConfigError, Violation, listed
from foundry.core.protocols import RunContext
from foundry.models.initialisation import InitialModel
from foundry.models.lora import add_adapters, count_by_kind, merge_adapters
from foundry.parallel.process_group import World
from foundry.parts.model import resolve_init_from
from foundry.run_dir.checkpoints import MANIFEST

log = logging.getLogger(__name__)

StartModel = Callable[[Any], InitialModel]
"""Function that builds a model from its configuration, with the weights of its transformers folder unless `init_from`
is set.
"""

_MOST_BASES = 16
"""Maximum length of a chain of adapter runs, each of which starts from the one before."""


@dataclass(frozen=True)
class Base:
    """Base weights of adapters.

    Attributes:
        digest: digest of the weights.
        path: source of the weights: a run, checkpoint, file or folder; None if they were randomly initialized or are
            provided by a custom model.
    """

    digest: str
    path: str | None

    @classmethod
    def of(cls, manifest: Manifest) -> "Base | None":
        """Return the base recorded in a checkpoint; None if the checkpoint holds all weights.

        Raises:
            CheckpointError: the manifest's entry is not in foundry's format.
        """
        if not manifest.base:
            return None
        digest, path = manifest.base.get("digest"), manifest.base.get("path")
        if not isinstance(digest, str) or not isinstance(path, (str, type(None))):
            raise CheckpointError(f"{MANIFEST} has no digest and path for the base")
        return cls(digest, path)

    def facts(self) -> dict[str, str | None]:
        """Return the base as stored in a manifest."""
        return dict(vars(self))


def resolve_weights(node: Any) -> Path | None:
    """Return the path in `init_from`, or else of the transformers folder, with a model's weights; None without one."""
    weights = resolve_init_from(node)
    return Path(node.path) if weights is None and isinstance(node, HuggingFace) and node.path else weights


def read_initial(node: Any, path: Path | None, start: StartModel, world: World, key: str) -> InitialModel:
    """Return a model with the weights at a path; adapters found there are merged into their base.

    Args:
        node: configuration of the model.
        path: path from `resolve_weights`; None returns the result of `start` unchanged.
        start: builds the model.
        world: process group; all ranks call this.
        key: config key of the path, for messages.

    Raises:
        ConfigError: there are no weights at the path, or they do not fit the model.
    """
    adapters, source = list[tuple[Path, Manifest, Base]](), path
    while source is not None and (adapter_checkpoint := _find_adapters(source, key)) is not None:
        adapters.append(adapter_checkpoint)
        if len(adapters) > _MOST_BASES:
            raise ConfigError(Violation(key, f"is {path}, whose chain of base models is too long or a cycle"))
        if adapter_checkpoint[2].path is None:
            message = f"is {path}, which has adapters on randomly initialized weights that are in no file"
            raise ConfigError(Violation(key, f"{message}; export it with merge=true, and use the export"))
        source = _path_of_base(adapter_checkpoint[0], adapter_checkpoint[2], key)
    if source is None:
        return start(node)
    has_init_from = not adapters and resolve_init_from(node) is not None
    if isinstance(node, HuggingFace) and (source / "config.json").is_file() and not has_init_from:
        initial = start(replace(node, path=str(source), init_from=None))
    else:
        init = {"init_from": str(source)}
        model = start({**node, **init} if isinstance(node, dict) else replace(node, **init)).model
        initial = InitialModel(model, partial(init_from, source, world))
    if not adapters:
        return initial
    model = initial.materialize()
    for folder, manifest, base in reversed(adapters):
        _merge(model, folder, manifest, base, world, key)
    return InitialModel(model)


def read_parts(initial: InitialModel, node: Any, world: World) -> InitialModel:
    """Return a model whose parts are initialized from the `init_from` paths in their own configuration nodes.

    Args:
        initial: the whole model with its other initial weights.
        node: configuration of the model.
        world: process group; all ranks call this.

    Raises:
        ConfigError: a part is missing from the model.
    """
    paths = weights_of_parts(node)
    modules = dict(initial.model.named_modules())
    if missing := [name for name in paths if name not in modules]:
        message = f"is given but {type(initial.model).__name__} has no part of that name"
        raise ConfigError(Violation(f"model.{missing[0]}.init_from", message))

    def fill(model: nn.Module) -> None:
        if initial.fill is not None:
            initial.fill(model)
        for name, path in paths.items():
            init_from(Path(path).expanduser(), world, model.get_submodule(name), key=f"model.{name}.init_from")

    return InitialModel(initial.model, fill) if paths else initial


def adapt(model: nn.Module, run: RunContext, path: Path | None) -> Base | None:
    """Add adapters to a model if configured, and return their base; otherwise return None.

    Args:
        model: model with its initial weights, not yet wrapped; changed in place.
        run: context with the adapters' settings.
        path: file or folder of the model's initial weights; None if they were randomly initialized.

    Raises:
        ConfigError: a selected layer does not exist in the model or cannot have an adapter.
    """
    peft = run.config.peft
    if not isinstance(peft, LoRA):
        return None
    base = Base(compute_digest(model), None if path is None else str(path.expanduser().absolute()))
    names = add_adapters(model, peft, run.seed)
    if path is None and not isinstance(run.config.model, dict):
        log.warning("peft=lora without a base: the frozen weights are random; set model=base model.path=...")
    log.info("adapters of rank %d: %s (%s)", peft.adapter_dim, count_by_kind(names), listed(names, 16))
    return base


def read_base(node: Any, checkpoint: Path, start: StartModel, world: World, key: str) -> nn.Module:
    """Return the base model, not yet wrapped, of the adapters in a checkpoint.

    Args:
        node: configuration of the model.
        checkpoint: checkpoint that contains adapters.
        start: builds the model, as in `read_initial`.
        world: process group; all ranks call this.
        key: config key of the checkpoint, for messages.

    Raises:
        ConfigError: the base is missing, or its weights have changed.
    """
    adapter_checkpoint = _find_adapters(checkpoint, key)
    if adapter_checkpoint is None:
        message = f"leads to {checkpoint}, which does not record the base weights of its adapters"
        raise ConfigError(Violation(key, message))
    folder, _, base = adapter_checkpoint
    path = None if base.path is None else _path_of_base(folder, base, key)
    model = read_initial(node, path, start, world, key).materialize()
    _check_digest(model, folder, base, key)
    return model


def find_base(checkpoint: Path) -> Path | None:
    """Return the path of the base of a checkpoint with adapters; None if the base is not stored in a file."""
    base = Base.of(read_manifest(checkpoint))
    return None if base is None or base.path is None else Path(base.path)


def _find_adapters(path: Path, key: str) -> tuple[Path, Manifest, Base] | None:
    """Return the checkpoint with adapters at a path, its manifest and its base; None if the path is anything else."""
    try:
        folder = find_checkpoint(path)
        if folder is None:
            return None
        manifest = read_manifest(folder)
        base = Base.of(manifest)
    except (OSError, CheckpointError) as error:
        raise ConfigError(Violation(key, f"is {path}: {error}")) from None
    return None if base is None else (folder, manifest, base)


def _path_of_base(folder: Path, base: Base, key: str) -> Path:
    """Return the path of the base of adapters, and check that it exists."""
    assert base.path is not None
    path = Path(base.path)
    if not path.exists():
        message = (
            f"leads to {folder}, adapters of the base {path}, which no longer exists; restore it or a symlink to it"
        )
        raise ConfigError(Violation(key, message))
    return path


def _check_digest(model: nn.Module, folder: Path, base: Base, key: str) -> None:
    if (digest := compute_digest(model)) != base.digest:
        message = (
            f"leads to {folder}, adapters of a base with the digest {base.digest}, but {base.path} now has {digest}"
        )
        raise ConfigError(Violation(key, f"{message}; restore the weights that they were trained with"))


def _merge(model: nn.Module, folder: Path, manifest: Manifest, base: Base, world: World, key: str) -> None:
    """Merge the adapters of a checkpoint into the base weights; their averaged weights, if the checkpoint has them."""
    _check_digest(model, folder, base, key)
    settings: Any = OmegaConf.to_object(typed_group(folder / MANIFEST, "peft", manifest.config.get("peft")))
    if not isinstance(settings, LoRA) or [*check_fields(settings, "peft"), *settings.check()]:
        raise ConfigError(Violation(key, f"leads to {folder}, whose adapters were not trained with foundry"))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    add_adapters(model, settings, seed=0)
    try:
        if problems := find_damage_on_all_ranks(folder, world):
            raise CheckpointError(f"{folder.name} is damaged: {'; '.join(problems)}")
        load_weights(folder, model, ema=True, trained_only=True)
    except (OSError, CheckpointError) as error:
        raise ConfigError(Violation(key, f"leads to {folder}: {error}")) from None
    merge_adapters(model)
    for parameter in trainable:
        parameter.requires_grad_(True)
