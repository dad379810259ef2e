"""OmegaConf resolvers: values of the configuration that are computed from other values."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.hydra_versions import register_resolver
from foundry.config.environment import detect
from foundry.config.image_folder import class_folders
from foundry.config.record.frozen import read_recorded
from foundry.config.schemas.launcher import resolve_num_tasks
from foundry.config.schemas.model import HuggingFace, folder_settings
from foundry.core.errors import ConfigError
from foundry.core.tasks import resolvers
from foundry.run_dir.checkpoints import run_of
from foundry.run_dir.names import TOKENIZER


def register_resolvers() -> None:
    """Register the resolvers of foundry and of all tasks with OmegaConf."""
    register_resolver("accum_freq", _accum_freq)
    register_resolver("times", _times)
    register_resolver("half", _half)
    register_resolver("where", _where)
    register_resolver("where_all", _where_all)
    register_resolver("unless_given", _unless_given)
    register_resolver("mode_of", _mode_of)
    register_resolver("direction_of", _direction_of)
    register_resolver("model_folder", _model_folder)
    register_resolver("model_vocab_size", _model_vocab_size)
    register_resolver("image_classes", _image_classes)
    for name, resolver in resolvers().items():
        register_resolver(name, resolver)


def _times(factor: float, value: float) -> float:
    return factor * value


def _half(value: int) -> int:
    return max(1, value // 2)


def _where(key: str, value: str, then: Any, otherwise: Any, *, _root_: DictConfig) -> Any:
    """Return `then` if the setting `key` exists and equals `value` as text, else `otherwise`."""
    return _where_all(then, otherwise, key, value, _root_=_root_)


def _where_all(then: Any, otherwise: Any, *conditions: Any, _root_: DictConfig) -> Any:
    """Return `then` if each setting equals its value as text, else `otherwise`; a missing setting is null.

    Args:
        then: value if all conditions are met.
        otherwise: value if one is not.
        conditions: settings and values in turn.
    """
    for key, value in zip(conditions[::2], conditions[1::2], strict=True):
        current = OmegaConf.select(_root_, key)
        if str(getattr(current, "name", current)) != str(value):
            return otherwise
    return then


def _unless_given(value: Any, *keys: str, _root_: DictConfig) -> Any:
    """Return a value, or null if one of the settings `keys` is set."""
    return value if all(OmegaConf.select(_root_, key) is None for key in keys) else None


def world_size(nproc_per_node: int) -> int:
    """Return the number of ranks: of torchrun, Slurm or submitit if it started this process, else `nproc_per_node`."""
    environment = detect()
    return nproc_per_node if environment.launcher == "single" else environment.world_size


def _direction_of(metric: str | None, *, _root_: DictConfig) -> str:
    """Return `evaluation.direction` if `metric` is null or `evaluation.metric`, and "minimize" for any other metric."""
    main_metric = OmegaConf.select(_root_, "evaluation.metric")
    direction = OmegaConf.select(_root_, "evaluation.direction")
    is_maximized = metric in (None, main_metric) and getattr(direction, "name", direction) == "maximize"
    return "maximize" if is_maximized else "minimize"


def _mode_of(metric: str | None, *, _root_: DictConfig) -> str:
    return _direction_of(metric, _root_=_root_).removesuffix("imize")


def _model_folder(*, _root_: DictConfig) -> str | None:
    """Return the transformers folder of the model, or the tokenizer of the run that initializes its language part.

    Returns None if the model has neither, or if the folder or the tokenizer's file does not exist.
    """
    if (run := _run_of_language_part(_root_)) is not None:
        return str(run / TOKENIZER) if (run / TOKENIZER).is_file() else None
    path = OmegaConf.select(_root_, "model.path")
    if path is None or OmegaConf.select(_root_, "model._target_") != HuggingFace._target_:
        return None
    return str(path) if Path(str(path)).expanduser().exists() else None


def _model_vocab_size(default: int, *, _root_: DictConfig) -> int:
    """Return the vocabulary size of the transformers folder or run that the model starts from.

    Returns `default` if there is neither, or if the vocabulary size is not recorded there.
    """
    if (run := _run_of_language_part(_root_)) is not None:
        model = (read_recorded(run) or {}).get("model")
        size = model.get("vocab_size") if isinstance(model, dict) else None
    else:
        path = _model_folder(_root_=_root_)
        size = None if path is None else folder_settings(path).get("vocab_size")
    return size if isinstance(size, int) else default


def _run_of_language_part(root: DictConfig) -> Path | None:
    """Return the run whose weights initialize the language part of the model.

    Returns None if the model has no language part, or if the language part starts from new weights.
    """
    part = getattr(OmegaConf.get_type(root, "model"), "language_part", None)
    weights = None if part is None else OmegaConf.select(root, f"model.{part}.init_from")
    return None if weights is None else run_of(Path(str(weights)).expanduser())


def _image_classes(*, _root_: DictConfig) -> int:
    """Return the number of class folders in `data.path`; 1 if the path cannot be read, which another check reports."""
    try:
        return len(class_folders(str(OmegaConf.select(_root_, "data.path"))))
    except ConfigError:
        return 1


def _accum_freq(global_batch_size: int, per_gpu_batch_size: int, nproc_per_node: int, *, _root_: DictConfig) -> int:
    """Return the number of microbatches per rank and optimizer step.

    OmegaConf passes the whole configuration as `_root_`.
    """
    ranks = world_size(max(nproc_per_node, resolve_num_tasks(_root_)))
    schema: Any = OmegaConf.get_type(_root_, "distributed")
    dp_size: int = schema.dp_size(_root_.distributed, ranks)
    return global_batch_size // max(1, per_gpu_batch_size * dp_size)
