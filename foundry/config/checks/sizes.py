"""Sizes that a model and its data must agree on, as far as their schemas say them."""

from collections.abc import Iterator
from typing import Any

from foundry.config.schemas.root import Config
from foundry.core.errors import Violation

_ENOUGH = (("vocab_size", "vocab_size"), ("max_seq_len", "seq_len"), ("num_classes", "num_classes"))


def check_sizes(config: Config) -> Iterator[Violation]:
    """Say which sizes of model and objective are not the data's, or less than these need."""
    same = [(name, name) for name in getattr(config.model, "same_as_data", ())]
    for pairs, is_wrong, wanted in ((same, int.__ne__, "must be"), (_ENOUGH, int.__lt__, "must be at least")):
        for own, other in pairs:
            have, need = _size(config.model, own), _size(config.data, other)
            if have is not None and need is not None and is_wrong(have, need):
                message = f"is {have} but {wanted} data.{other}={need}; leave it out to follow the data"
                yield Violation(f"model.{own}", message)
    for name in getattr(config.objective, "same_as_data", ()):
        have, need = _size(config.objective, name), _size(config.data, name)
        if have is not None and need is not None and have != need:
            message = f"is {have} but must be data.{name}={need}; leave it out to follow the data"
            yield Violation(f"objective.{name}", message)


def _size(part: Any, name: str) -> int | None:
    value = getattr(part, name, None)
    return value if isinstance(value, int) else None
