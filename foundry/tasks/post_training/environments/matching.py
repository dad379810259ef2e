"""Environments that compare answers with a reference answer or a pattern."""

import re
from collections.abc import Sequence
from typing import Any

from foundry.config.configured import configured_by
from foundry.generation.scoring import Answer, Scores
from foundry.tasks.post_training.schemas.environment import ExactMatch as ExactMatchSettings
from foundry.tasks.post_training.schemas.environment import Format as FormatSettings
from foundry.tasks.post_training.schemas.environment import MultipleChoice as MultipleChoiceSettings


class ExactMatch:
    """Environment that scores `correct` if a completion equals the row's `answer`, except for surrounding whitespace.

    With a pattern, only the pattern's last match in the completion is compared, and `format` is 1 if there is a match.
    """

    @configured_by(ExactMatchSettings)
    def __init__(self, settings: ExactMatchSettings) -> None:
        self.settings = settings
        self._pattern = None if settings.pattern is None else re.compile(settings.pattern)

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """Return the scores of each answer, with None for `correct` if the row has no `answer`."""
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Scores:
        prediction = answer.text if self._pattern is None else find_last(self._pattern, answer.text)
        target = answer.columns.get("answer")
        is_correct = prediction is not None and self._normalise(prediction) == self._normalise(target)
        scores: dict[str, float | None] = {"correct": None if target is None else float(is_correct)}
        return scores if self._pattern is None else {**scores, "format": float(prediction is not None)}

    def _normalise(self, value: Any) -> str:
        text = str(value).strip()
        return text.casefold() if self.settings.ignore_case else text


class MultipleChoice:
    """Environment for multiple-choice questions.

    It scores `correct` if the last choice in a completion is the row's `answer`, and `format` if there is a choice.
    """

    @configured_by(MultipleChoiceSettings)
    def __init__(self, settings: MultipleChoiceSettings) -> None:
        self._choices, pattern = settings.choices, settings.pattern
        self._pattern = re.compile(rf"\b([{re.escape(self._choices)}])\b" if pattern is None else pattern)

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """Return the scores of each answer, with None for `correct` if the row's `answer` is not a choice."""
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Scores:
        prediction, target = find_last(self._pattern, answer.text), self._letter(answer.columns.get("answer"))
        is_choice = prediction is not None and self._is_choice(prediction.strip())
        is_correct = prediction is not None and prediction.strip() == target
        return {"correct": None if target is None else float(is_correct), "format": float(is_choice)}

    def _letter(self, value: Any) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return self._choices[value] if 0 <= value < len(self._choices) else None
        text = str(value).strip()
        return text if self._is_choice(text) else None

    def _is_choice(self, text: str) -> bool:
        return len(text) == 1 and text in self._choices


class Format:
    """Environment that scores `format` if a pattern matches the whole completion."""

    @configured_by(FormatSettings)
    def __init__(self, settings: FormatSettings) -> None:
        self._pattern = re.compile(settings.pattern, re.DOTALL)

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """Return `format` for each answer: 1 if the pattern matches the answer except outer whitespace, else 0."""
        return [{"format": float(self._pattern.fullmatch(answer.text.strip()) is not None)} for answer in answers]


class Arithmetic:
    """Environment for arithmetic problems.

    It scores `correct` if the number after the last `Answer:` is that of the row's `answer`, and `format` if the text
    ends with `Answer:` and a number.
    """

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """Return the scores of each answer, with None for `correct` if the row's `answer` has no number."""
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Scores:
        prediction = find_last(_ANSWER, answer.text)
        column = str(answer.columns.get("answer", "")).strip()
        target = column if _NUMBER.fullmatch(column) else find_last(_ANSWER, column)
        is_correct = prediction is not None and prediction == target
        scores = {"correct": None if target is None else float(is_correct)}
        return {**scores, "format": float(_ENDS.search(answer.text) is not None)}


_NUMBER = re.compile(r"-?\d+")
_ANSWER = re.compile(r"Answer: (-?\d+)")
_ENDS = re.compile(r"Answer: -?\d+\s*$")


def find_last(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of a pattern's last match, or the whole match if the pattern has no groups.

    Returns None if there is no match.
    """
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    last: str | None = matches[-1].group(1 if pattern.groups else 0)
    return last
