"""Expansion of `model=base` into the model, weights and tokenizer of an earlier run or a transformers folder.

The expansion happens while a configuration is composed. Only the model is taken from a run's config.yaml, and only if
it is a built-in part or `model.trust=true`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from foundry.config.build import weights_of_parts
from foundry.config.composition.store import writable
from foundry.config.record.frozen import typed_group
from foundry.config.record.recorded import foreign_parts, missing_tasks, read_settings
from foundry.config.schemas.data import MODEL_TOKENIZER, MODEL_VOCAB_SIZE
from foundry.config.schemas.model import Base, HuggingFace
from foundry.config.sources import download_hint, local_path
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.run_dir.checkpoints import find
from foundry.run_dir.files import in_hub_cache
from foundry.run_dir.names import CHAT_TEMPLATE, CONFIG, TOKENIZER, TRANSFORMERS


@dataclass(frozen=True)
class BaseKeys:
    """Keys of the settings that choose an existing model, used in error messages.

    Attributes:
        path: key of the run directory or transformers folder.
        which: key of the checkpoint of that run.
        trust: key of the flag that allows models that are not built-in parts.
    """

    path: str
    which: str
    trust: str


_MODEL = BaseKeys("model.path", "model.which", "model.trust")
_PATH = _MODEL.path
FIXED_BY_BASE = (
    "is fixed by the base model and cannot be set; leave it out, or choose model=transformer for a new model"
)


def expand_base(composed: DictConfig) -> list[Violation]:
    """Replace `model=base` in a composed configuration by the model that it refers to, and fill in its data settings.

    A configuration with any other model is left unchanged.

    Returns:
        The errors in the base and in settings that conflict with it. After an error, the configuration is unchanged.
    """
    node = composed._get_node("model")
    if not isinstance(node, DictConfig) or OmegaConf.get_type(node) is not Base:
        return []
    base_fields = {item.name for item in fields(Base)}
    if extra_names := [name for name in map(str, node) if name not in base_fields]:
        return [Violation(f"model.{name}", FIXED_BY_BASE) for name in extra_names]
    if OmegaConf.is_missing(node, "path"):
        message = "has no value (the run directory or transformers folder to start from)"
        return [Violation(_PATH, f"{message}; give it as {_PATH}=...")]
    try:
        base: Any = OmegaConf.to_object(OmegaConf.masked_copy(node, ["path", "which", "trust", "init_from"]))
        folder = local_path(_PATH, str(base["path"]))
        if base["init_from"] is not None:
            message = f"is {as_text(base['init_from'])} but model=base loads its weights from model.path"
            return [Violation("model.init_from", f"{message}; leave it out")]
        is_transformers = (folder / "config.json").is_file()
        model = resolve_base(folder, str(base["which"]), base["trust"], _MODEL)
    except ConfigError as error:
        return list(error.violations)
    except (OmegaConfBaseException, OSError, ValueError, RuntimeError) as error:
        return [Violation(_PATH, f"is {as_text(node._get_node('path'))}: {' '.join(str(error).split())}")]
    files = {"chat_template": in_hub_cache(folder / CHAT_TEMPLATE)} | (
        {} if is_transformers else {"tokenizer": folder / TOKENIZER}
    )
    if violations := list(_check_data(composed.data, model, folder, files)):
        return violations
    with open_dict(composed):
        composed.model = model
        _fill_data(composed.data, model, files)
    return []


def resolve_base(folder: Path, which: str, trust: bool, keys: BaseKeys) -> DictConfig:
    """Return the configuration of the model of a run or of a transformers folder, including the path of its weights.

    Args:
        folder: the run directory or transformers folder.
        which: checkpoint of a run: last, best, or a step number.
        trust: allow a run's model that is not a built-in part.
        keys: the settings to name in error messages.

    Raises:
        ConfigError: if the model or checkpoint does not exist, cannot be read or is not trusted, or if `which` or
            `trust` is set for a transformers folder.
    """
    if violations := list(_check_base(folder, which, trust, keys)):
        raise ConfigError(violations)
    if (folder / "config.json").is_file():
        model = writable(HuggingFace)
        model.path = str(folder)
        return model
    return _run_model(folder, which, trust, keys)


def _check_base(folder: Path, which: str, trust: bool, keys: BaseKeys) -> Iterator[Violation]:
    if not folder.is_dir():
        remedy = download_hint(str(folder)) or "; give a run directory or a transformers folder"
        yield Violation(keys.path, f"is {as_text(folder)}, which does not exist{remedy}")
        return
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            message = f"is {as_text(folder)}, which has adapters without their base model; give the run that they were"
            yield Violation(keys.path, f"{message} exported from, or a folder exported with merge=true")
        elif not os.path.lexists(folder / CONFIG):
            message = f"is {as_text(folder)}, which is neither a run directory (it has no {CONFIG})"
            yield Violation(keys.path, f"{message} nor a transformers folder (it has no config.json)")
        return
    reason = f"but {keys.path} is a transformers folder, which has no"
    if which != "last":
        yield Violation(keys.which, f"is {as_text(which)} {reason} checkpoints; leave it out")
    if trust:
        message = f"is true {reason} custom parts: code in it is never run; leave it out"
        yield Violation(keys.trust, message)


def _run_model(run_dir: Path, which: str, trust: bool, keys: BaseKeys) -> DictConfig:
    """Return the recorded model of a run, with `init_from` set to the checkpoint `which` of the run.

    Raises:
        ConfigError: if the model is not trusted, if this version of foundry cannot read it, or if the checkpoint does
            not exist.
    """
    file = run_dir / CONFIG
    recorded = read_settings(file, keys.path).get("model")
    if missing := list(missing_tasks({"model": recorded})):
        raise ConfigError(Violation(keys.path, f"is {run_dir}, whose {CONFIG} {line}") for line in missing)
    if not trust and (foreign := list(foreign_parts({"model": recorded}))):
        message = f"is {run_dir}, whose {CONFIG} uses custom code: {', '.join(foreign)}"
        raise ConfigError(Violation(keys.path, f"{message}; add {keys.trust}=true if you trust its author"))
    try:
        model_node = typed_group(file, "model", recorded)
    except ConfigError as error:
        raise ConfigError(replace(violation, key=keys.path) for violation in error.violations) from None
    model = model_node if isinstance(model_node, DictConfig) else OmegaConf.create(model_node)
    try:
        checkpoint = find(run_dir, which)
    except FileNotFoundError as error:
        raise ConfigError(Violation(keys.which, f"is {as_text(which)} but {error}")) from None
    with open_dict(model):
        model.init_from = str(checkpoint)
        for part in weights_of_parts(OmegaConf.to_container(model)):
            OmegaConf.update(model, f"{part}.init_from", None)  # the checkpoint contains the weights of the part
    if OmegaConf.get_type(model) is HuggingFace and model.path is not None:
        own_folder = run_dir.absolute() / TRANSFORMERS
        if own_folder.is_dir():
            model.path = str(own_folder)
        elif not trust:
            message = (
                f"is {run_dir}, which has no folder {TRANSFORMERS}/, and whose model comes from {as_text(model.path)}"
            )
            remedy = f"add {keys.trust}=true to read that folder"
            raise ConfigError(Violation(keys.path, f"{message}, outside of the run; {remedy}"))
    return model


def _check_data(data: Any, model: DictConfig, folder: Path, files: Mapping[str, Path]) -> Iterator[Violation]:
    """Yield errors: text for a model without tokens, data sizes above the base's sizes, missing files of the base."""
    is_text = _has_text(data) and _text_setting(data) is None
    if is_text and (kind := kind_without_tokens(model)):
        yield Violation(_PATH, f"is {folder}, whose model is {kind}, but the data is text; choose a language model")
        return
    for model_key, data_key, unit in (("vocab_size", "vocab_size", "tokens"), ("max_seq_len", "seq_len", "positions")):
        size = _fixed_size(model, model_key)
        need = data.get(data_key) if isinstance(data, DictConfig) and not _is_default(data, data_key) else None
        if isinstance(size, int) and isinstance(need, int) and need > size:
            message = f"is {need} but the model of model.path={folder} has {size} {unit}; set data.{data_key}={size}"
            yield Violation(f"data.{data_key}", message)
    for name, file in files.items() if _has_text(data) else ():
        is_needed = name == "tokenizer" or os.path.lexists(file)
        if _is_default(data, name) and is_needed and (file.is_symlink() or not file.is_file()):
            message = f"is {folder}, which has no regular file {file.name}; set data.{name}=..."
            yield Violation(_PATH, message)


def _fill_data(data: Any, model: DictConfig, files: Mapping[str, Path]) -> None:
    """Fill in the base's tokenizer, vocabulary size and chat template in text data, if the user has not set them."""
    size = _fixed_size(model, "vocab_size")
    values: dict[str, Any] = {name: str(file.absolute()) for name, file in files.items() if file.is_file()}
    for name, value in {**values, "vocab_size": size}.items() if _has_text(data) else ():
        if value is not None and _is_default(data, name):
            data[name] = value


def _has_text(data: Any) -> bool:
    """Return True if the samples of the data contain text tokens, which for some data depends on `_text_setting`."""
    if not isinstance(data, DictConfig) or "tokenizer" not in data:
        return False
    setting = _text_setting(data)
    return setting is None or data.get(setting) is not None


def _text_setting(data: DictConfig) -> str | None:
    """Return the name of the setting that enables text in the samples; None if all samples have text."""
    return getattr(OmegaConf.get_type(data), "words_if", None)


def kind_without_tokens(model: DictConfig) -> str | None:
    """Return the name of the schema of a model that reads no tokens, such as `DiT`; None for any other model."""
    schema = OmegaConf.get_type(model)
    wants = getattr(schema, "wants", None)
    return None if schema is None or wants is None or "tokens" in wants else schema.__name__


def _fixed_size(model: DictConfig, name: str) -> Any:
    """Return the model's size `name`; None if the size is interpolated from the data or the model does not have it.

    If the model has a language part, this is a size of that part, such as its `vocab_size`.
    """
    part = getattr(OmegaConf.get_type(model), "language_part", None)
    model = model if part is None else model[part]
    return model[name] if name in model and not OmegaConf.is_interpolation(model, name) else None


def _is_default(data: Any, name: str) -> bool:
    """Return True if the data has a setting of this name that still has its default value."""
    if not isinstance(data, DictConfig) or name not in data:
        return False
    node: Any = data._get_node(name)
    return node._value() in (MODEL_TOKENIZER, MODEL_VOCAB_SIZE) or (name == "chat_template" and node._is_none())
