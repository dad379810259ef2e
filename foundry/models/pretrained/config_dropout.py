"""Dropout probabilities in transformers configs, whose field names differ between architectures."""

import operator
import re
from collections.abc import Iterator
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from foundry.core.errors import ConfigError, Violation, as_text

_DROPOUT = re.compile("drop")
_ATTENTION = re.compile("attention|attn")
_OTHER_HEADS = re.compile("classifier|summary")
_INNER_DROPOUT = re.compile("activation|layerdrop")
"""Names of dropout inside feed-forward layers and of layer dropping, which are changed only by a dropout of 0."""


def set_dropouts(config: PreTrainedConfig, **dropouts: float | None) -> dict[str, Any]:
    """Set the dropout probabilities of hidden states and attention weights in all fields of a config.

    Args:
        config: config of the model, changed in place.
        dropouts: `hidden_dropout` and `attention_dropout`. None leaves the fields of that kind unchanged; 0 disables
            all dropout of that kind.

    Returns:
        The previous values of the changed fields, by dotted name.

    Raises:
        ConfigError: a probability is above zero, but the architecture has no field for it.
    """
    previous: dict[str, Any] = {}
    for kind, value in dropouts.items():
        if value is None:
            continue
        field_names = [
            name for name in _fields(config) if _kind(name) == kind and (value == 0 or not _INNER_DROPOUT.search(name))
        ]
        if not field_names and value > 0:
            message = f"is {value} but transformers' {config.model_type} has no {kind.replace('_', ' ')}"
            raise ConfigError(Violation(f"objective.{kind}", f"{message}; set it to null"))
        for name in field_names:
            previous[name] = put(config, name, value)
    return previous


def find_wrong_dropouts(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted names of dropout fields that are not probabilities, each with the reason."""
    for name in _fields(config):
        value = operator.attrgetter(name)(config)
        if not 0 <= value <= 1:
            yield name, f"{as_text(value)} but must be a probability from 0 to 1"


def put(config: PreTrainedConfig, name: str, value: Any) -> Any:
    """Set the field with a dotted name and return its previous value.

    The value is written to `vars()`, because some configs declare a probability as an integer and would reject a float.
    """
    *path, field = name.split(".")
    node: Any = config
    for part in path:
        node = getattr(node, part)
    previous = vars(node)[field]
    vars(node)[field] = value
    return previous


def _fields(config: PreTrainedConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of dropout probabilities in a config and in its nested configs."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _fields(value, f"{prefix}{name}.")
        elif _DROPOUT.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{name}"


def _kind(name: str) -> str | None:
    """Return the setting that determines a dropout field; None for fields of heads that language models lack."""
    if _OTHER_HEADS.search(name):
        return None
    return "attention_dropout" if _ATTENTION.search(name.rpartition(".")[2]) else "hidden_dropout"
