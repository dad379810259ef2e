"""The model with which a run starts: first weights or those of a base, and adapters beside them.

A run of adapters keeps these alone. Its base is read again when the run is resumed or opened, and compared with the
digest that its checkpoints hold.
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
from foundry.checkpoint.verification import damage_together
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
"""Makes the model of a configuration; of a folder of transformers with its weights, unless `init_from` says others."""

_MOST_BASES = 16
"""Runs of adapters, each the base of the next."""


@dataclass(frozen=True)
class Base:
    """What adapters were trained beside.

    Attributes:
        digest: of its weights.
        path: run, checkpoint, file or folder that they came from; None where they were drawn, or the part's own.
    """

    digest: str
    path: str | None

    @classmethod
    def of(cls, manifest: Manifest) -> "Base | None":
        """That of a checkpoint; None for one that holds all weights.

        Raises:
            CheckpointError: the manifest says it as foundry does not.
        """
        if not manifest.base:
            return None
        digest, path = manifest.base.get("digest"), manifest.base.get("path")
        if not isinstance(digest, str) or not isinstance(path, (str, type(None))):
            raise CheckpointError(f"{MANIFEST} does not say digest and path of the base")
        return cls(digest, path)

    def facts(self) -> dict[str, str | None]:
        """As a manifest holds it."""
        return dict(vars(self))


def resolve_weights(node: Any) -> Path | None:
    """Where the weights of a model come from, if from anywhere."""
    weights = resolve_init_from(node)
    return Path(node.path) if weights is None and isinstance(node, HuggingFace) and node.path else weights


def read_initial(node: Any, path: Path | None, start: StartModel, world: World, key: str) -> InitialModel:
    """A model and the weights that lie at a path; adapters there are merged into their base.

    Args:
        node: configuration of the model.
        path: from `resolve_weights`; None: what `start` makes is all.
        start: makes the model.
        world: all ranks call this together.
        key: of the setting that leads to the weights, for messages.

    Raises:
        ConfigError: there are no such weights, or they are not the model's.
    """
    adapters, source = list[tuple[Path, Manifest, Base]](), path
    while source is not None and (found := _find_adapters(source, key)) is not None:
        adapters.append(found)
        if len(adapters) > _MOST_BASES:
            raise ConfigError(Violation(key, f"is {path}, whose base has a base, and so on without end"))
        if found[2].path is None:
            message = f"is {path}, adapters beside weights that were drawn, which no file has"
            raise ConfigError(Violation(key, f"{message}; export it with merge=true, and start from that"))
        source = _path_of_base(found[0], found[2], key)
    if source is None:
        return start(node)
    is_given = not adapters and resolve_init_from(node) is not None
    if isinstance(node, HuggingFace) and (source / "config.json").is_file() and not is_given:
        initial = start(replace(node, path=str(source), init_from=None))
    else:
        given = {"init_from": str(source)}
        model = start({**node, **given} if isinstance(node, dict) else replace(node, **given)).model
        initial = InitialModel(model, partial(init_from, source, world))
    if not adapters:
        return initial
    model = initial.whole()
    for folder, manifest, base in reversed(adapters):
        _merge(model, folder, manifest, base, world, key)
    return InitialModel(model)


def read_parts(initial: InitialModel, node: Any, world: World) -> InitialModel:
    """A model of which parts start from weights that lie elsewhere, as their nodes in its configuration say.

    Args:
        initial: the whole model as it starts otherwise.
        node: configuration of the model.
        world: all ranks call this together.

    Raises:
        ConfigError: the model has no such part.
    """
    found = weights_of_parts(node)
    there = dict(initial.model.named_modules())
    if missing := [name for name in found if name not in there]:
        message = f"is given but {type(initial.model).__name__} has no part of that name"
        raise ConfigError(Violation(f"model.{missing[0]}.init_from", message))

    def fill(model: nn.Module) -> None:
        if initial.fill is not None:
            initial.fill(model)
        for name, path in found.items():
            init_from(Path(path).expanduser(), world, model.get_submodule(name), key=f"model.{name}.init_from")

    return InitialModel(initial.model, fill) if found else initial


def adapt(model: nn.Module, run: RunContext, path: Path | None) -> Base | None:
    """Give a model adapters where the configuration asks for them; returns what they are trained beside.

    Args:
        model: with its initial weights, not yet wrapped; changed in place.
        run: has the settings of the adapters.
        path: that the weights came from.

    Raises:
        ConfigError: a layer is chosen that the model has not, or that cannot have an adapter.
    """
    peft = run.config.peft
    if not isinstance(peft, LoRA):
        return None
    base = Base(compute_digest(model), None if path is None else str(path.expanduser().absolute()))
    names = add_adapters(model, peft, run.seed)
    if path is None and not isinstance(run.config.model, dict):
        log.warning("peft=lora without a base: what is frozen was drawn; choose model=base model.path=...")
    log.info("adapters of rank %d: %s (%s)", peft.adapter_dim, count_by_kind(names), listed(names, 16))
    return base


def read_base(node: Any, checkpoint: Path, start: StartModel, world: World, key: str) -> nn.Module:
    """The model, not yet wrapped, beside which the adapters of a checkpoint were trained.

    Args:
        node: configuration of the model.
        checkpoint: holds adapters.
        start: as for `read_initial`.
        world: all ranks call this together.
        key: of the setting that leads to the checkpoint, for messages.

    Raises:
        ConfigError: it is no longer where it was, or is another.
    """
    found = _find_adapters(checkpoint, key)
    if found is None:
        message = f"leads to {checkpoint}, which does not say beside which weights its adapters were trained"
        raise ConfigError(Violation(key, message))
    folder, _, base = found
    path = None if base.path is None else _path_of_base(folder, base, key)
    model = read_initial(node, path, start, world, key).whole()
    _check_digest(model, folder, base, key)
    return model


def find_base(checkpoint: Path) -> Path | None:
    """Where the base of a checkpoint of adapters came from; None where no file has it."""
    base = Base.of(read_manifest(checkpoint))
    return None if base is None or base.path is None else Path(base.path)


def _find_adapters(path: Path, key: str) -> tuple[Path, Manifest, Base] | None:
    """The checkpoint of adapters that a path leads to; None where it leads to anything else."""
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
    """Where the base of adapters lies."""
    assert base.path is not None
    path = Path(base.path)
    if not path.exists():
        message = (
            f"leads to {folder}, adapters of the base {path}, which is no longer there; put it back there, or a link"
        )
        raise ConfigError(Violation(key, message))
    return path


def _check_digest(model: nn.Module, folder: Path, base: Base, key: str) -> None:
    if (digest := compute_digest(model)) != base.digest:
        message = (
            f"leads to {folder}, adapters of a base with the digest {base.digest}, but {base.path} now has {digest}"
        )
        raise ConfigError(Violation(key, f"{message}; put back the weights that they were trained with"))


def _merge(model: nn.Module, folder: Path, manifest: Manifest, base: Base, world: World, key: str) -> None:
    """Add the adapters of a checkpoint, averaged where they are, to the weights beside which they were trained."""
    _check_digest(model, folder, base, key)
    settings: Any = OmegaConf.to_object(typed_group(folder / MANIFEST, "peft", manifest.config.get("peft")))
    if not isinstance(settings, LoRA) or [*check_fields(settings, "peft"), *settings.check()]:
        raise ConfigError(Violation(key, f"leads to {folder}, whose adapters are none that foundry has trained"))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    add_adapters(model, settings, seed=0)
    try:
        if wrong := damage_together(folder, world):
            raise CheckpointError(f"{folder.name} is not whole: {'; '.join(wrong)}")
        load_weights(folder, model, ema=True, trained_only=True)
    except (OSError, CheckpointError) as error:
        raise ConfigError(Violation(key, f"leads to {folder}: {error}")) from None
    merge_adapters(model)
    for parameter in trainable:
        parameter.requires_grad_(True)
