"""Dropout of transformers models: the fields of their configs, which each architecture names in its own way."""

import operator
import re
from collections.abc import Iterator
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from foundry.core.errors import ConfigError, Violation, shown

_DROPOUT = re.compile("drop")
_ATTENTION = re.compile("attention|attn")
_OF_OTHER_HEADS = re.compile("classifier|summary")
_ONLY_WITHIN = re.compile("activation|layerdrop")
"""Hidden states inside a feed-forward layer, and whole layers: zeroed with `hidden_dropout=0`, else left alone."""


def set_dropouts(config: PreTrainedConfig, **dropouts: float | None) -> dict[str, Any]:
    """Put probabilities into every field of a config that drops hidden states or attention weights.

    Args:
        config: of the model, which is changed.
        dropouts: `hidden_dropout` and `attention_dropout`; None leaves the fields of that kind as they are. Zero leaves
            nothing of that kind that drops.

    Returns:
        The fields that were changed, by dotted name, with the values that they had.

    Raises:
        ConfigError: a probability above zero for an architecture without such a field.
    """
    had: dict[str, Any] = {}
    for kind, value in dropouts.items():
        if value is None:
            continue
        own = [
            name for name in _fields(config) if _kind(name) == kind and (value == 0 or not _ONLY_WITHIN.search(name))
        ]
        if not own and value > 0:
            message = f"is {value} but transformers' {config.model_type} has no {kind.replace('_', ' ')}"
            raise ConfigError(Violation(f"objective.{kind}", f"{message}; set it to null"))
        for name in own:
            had[name] = put(config, name, value)
    return had


def find_wrong_dropouts(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted names of fields that are no probabilities, each with the reason."""
    for name in _fields(config):
        value = operator.attrgetter(name)(config)
        if not 0 <= value <= 1:
            yield name, f"{shown(value)} but must be a probability from 0 to 1"


def put(config: PreTrainedConfig, name: str, value: Any) -> Any:
    """Set the field of a dotted name, and return the value that it had.

    Some configs declare a probability as an integer, so the check of the type is passed over.
    """
    *path, field = name.split(".")
    node: Any = config
    for part in path:
        node = getattr(node, part)
    had = vars(node)[field]
    vars(node)[field] = value
    return had


def _fields(config: PreTrainedConfig, prefix: str = "") -> Iterator[str]:
    """The dotted names of the fields of a config, and of those within it, that are probabilities of dropping."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _fields(value, f"{prefix}{name}.")
        elif _DROPOUT.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{name}"


def _kind(name: str) -> str | None:
    """The setting that a field follows; None for one of a head that no language model has."""
    if _OF_OTHER_HEADS.search(name):
        return None
    return "attention_dropout" if _ATTENTION.search(name.rpartition(".")[2]) else "hidden_dropout"
