"""Interface of environments: their input, the answers, and their output, the scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Scores = Mapping[str, float | None]
"""Scores of an answer by name; None or NaN if a score cannot be determined."""


@dataclass(frozen=True)
class Answer:
    """Completion of a prompt by a model.

    Attributes:
        text: the completion, without its stop token.
        prompt: the prompt as the model received it.
        columns: columns of the prompt's row, such as `answer`.
        is_truncated: whether it reached the length limit instead of a stop token.
    """

    text: str
    prompt: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_truncated: bool = False


class Environment(Protocol):
    """Protocol of an environment, which scores each answer independently, so that batching has no effect."""

    def score(self, answers: Sequence[Answer]) -> Sequence[Scores]:
        """Return the scores of each answer, by name.

        A user-defined environment receives one answer per call by default.
        """
        ...
