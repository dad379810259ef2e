"""What an environment is given, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Scores = Mapping[str, float | None]
"""What an answer is worth, by name; None or NaN where that cannot be told."""


@dataclass(frozen=True)
class Answer:
    """What a model has answered.

    Attributes:
        text: without the token that ends it.
        prompt: what it answers, as the model was given it.
        columns: of the prompt's row: `answer`, and whatever else the data has.
        is_truncated: it did not end by itself.
    """

    text: str
    prompt: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_truncated: bool = False


class Environment(Protocol):
    """Scores answers; each by itself, so that batches change nothing."""

    def score(self, answers: Sequence[Answer]) -> Sequence[Scores]:
        """The scores of each answer, by name; one of the user's own is given one answer at a time."""
        ...
