"""`objective.teacher`: the model of another run or of a transformers folder, which a student is distilled from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.build import field_of
from foundry.config.composition.base import BaseKeys, kind_without_tokens, resolve_base
from foundry.config.sources import local_path
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.checkpoints import parse_step
from foundry.tasks.post_training.schemas.objective import Distillation

KEYS = BaseKeys("objective.teacher", "objective.teacher_which", "objective.teacher_trust")


def resolve_teacher(folder: Path, which: str, trust: bool, sizes: Mapping[str, int]) -> Any:
    """Return the configuration of the teacher model.

    Args:
        folder: run directory or transformers folder.
        which: checkpoint of a run: last, best, or a step number.
        trust: allow a run's model that is not a built-in part.
        sizes: `vocab_size` and `max_seq_len` of the student; they become sizes of a teacher that leaves them open.

    Raises:
        ConfigError: if there is no language model, it is not trusted, or its sizes do not fit the student.
    """
    node = resolve_base(folder, which, trust, KEYS)
    if kind := kind_without_tokens(node):
        raise ConfigError(Violation(KEYS.path, f"is {folder}, whose model is {kind}; choose a language model"))
    for name, size in sizes.items():
        if OmegaConf.is_interpolation(node, name):
            node[name] = size
    limits = node.get("vocab_size"), node.get("max_seq_len")
    message = f"is {folder}, whose model has"
    if isinstance(limits[0], int) and limits[0] != sizes["vocab_size"]:
        text = f"{message} {limits[0]} tokens but the student has {sizes['vocab_size']}; both need the same tokenizer"
        raise ConfigError(Violation(KEYS.path, text))
    if isinstance(limits[1], int) and limits[1] < sizes["max_seq_len"]:
        text = f"{message} {limits[1]} positions; lower model.max_seq_len={sizes['max_seq_len']} to that"
        raise ConfigError(Violation(KEYS.path, text))
    return OmegaConf.to_object(node)


def pin_teacher(composed: DictConfig) -> list[Violation]:
    """Replace `last` or `best` in `teacher_which` by the step number, so that a resumed run has the same teacher.

    Returns:
        The errors in the settings of the teacher. If there are errors, the configuration is unchanged.
    """
    objective = composed._get_node("objective")
    if not isinstance(objective, DictConfig) or OmegaConf.get_type(objective) is not Distillation:
        return []
    if any(OmegaConf.is_missing(objective, name) for name in ("teacher", "teacher_which", "teacher_trust")):
        return []
    try:
        folder, which = local_path(KEYS.path, str(objective.teacher)), str(objective.teacher_which)
        sizes = {name: int(objective[name]) for name in ("vocab_size", "max_seq_len")}
        node = resolve_teacher(folder, which, bool(objective.teacher_trust), sizes)
    except ConfigError as error:
        return list(error.violations)
    except (OmegaConfBaseException, TypeError, ValueError, OSError):
        return []  # the settings' own checks report these
    weights = field_of(node, "init_from")
    if weights is not None:
        objective.teacher_which = str(parse_step(Path(weights)))
    return []
