"""Environments that compare answers with what they are to be, or to look like."""

import re
from collections.abc import Sequence
from typing import Any

from foundry.config.configured import configured_by
from foundry.config.schemas.environment import ExactMatch as ExactMatchSettings
from foundry.config.schemas.environment import Format as FormatSettings
from foundry.config.schemas.environment import MultipleChoice as MultipleChoiceSettings
from foundry.environments.protocol import Answer, Scores


class ExactMatch:
    """`correct` if the answer is that of the row, but for white space around it; `format` if a pattern matches."""

    @configured_by(ExactMatchSettings)
    def __init__(self, settings: ExactMatchSettings) -> None:
        self.settings = settings
        self._pattern = None if settings.pattern is None else re.compile(settings.pattern)

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """`correct` is None where the row has no `answer`."""
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Scores:
        found = answer.text if self._pattern is None else find_last(self._pattern, answer.text)
        wanted = answer.columns.get("answer")
        is_correct = found is not None and self._folded(found) == self._folded(wanted)
        scores: dict[str, float | None] = {"correct": None if wanted is None else float(is_correct)}
        return scores if self._pattern is None else {**scores, "format": float(found is not None)}

    def _folded(self, value: Any) -> str:
        text = str(value).strip()
        return text.casefold() if self.settings.ignore_case else text


class MultipleChoice:
    """`correct` where the last choice that is named is that of the row; `format` where one is named."""

    @configured_by(MultipleChoiceSettings)
    def __init__(self, settings: MultipleChoiceSettings) -> None:
        self._choices, pattern = settings.choices, settings.pattern
        self._pattern = re.compile(rf"\b([{re.escape(self._choices)}])\b" if pattern is None else pattern)

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """`correct` is None where the row's `answer` is no choice."""
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Scores:
        found, wanted = find_last(self._pattern, answer.text), self._letter(answer.columns.get("answer"))
        is_choice = found is not None and found.strip() in self._choices
        is_correct = found is not None and found.strip() == wanted
        return {"correct": None if wanted is None else float(is_correct), "format": float(is_choice)}

    def _letter(self, value: Any) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return self._choices[value] if 0 <= value < len(self._choices) else None
        text = str(value).strip()
        return text if len(text) == 1 and text in self._choices else None


class Format:
    """`format` where the whole answer matches."""

    @configured_by(FormatSettings)
    def __init__(self, settings: FormatSettings) -> None:
        self._pattern = re.compile(settings.pattern, re.DOTALL)

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """1 or 0 for each answer."""
        return [{"format": float(self._pattern.fullmatch(answer.text.strip()) is not None)} for answer in answers]


class Arithmetic:
    """`correct` where the number after the last `Answer:` is that of the row; `format` where the text ends with one."""

    def score(self, answers: Sequence[Answer]) -> list[Scores]:
        """`correct` is None where the row's `answer` has no number."""
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Scores:
        found = find_last(_ANSWER, answer.text)
        column = str(answer.columns.get("answer", "")).strip()
        wanted = column if _NUMBER.fullmatch(column) else find_last(_ANSWER, column)
        is_correct = found is not None and found == wanted
        scores = {"correct": None if wanted is None else float(is_correct)}
        return {**scores, "format": float(_ENDS.search(answer.text) is not None)}


_NUMBER = re.compile(r"-?\d+")
_ANSWER = re.compile(r"Answer: (-?\d+)")
_ENDS = re.compile(r"Answer: -?\d+\s*$")


def find_last(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of a pattern's last match, or all of that where it has no group; None: it does not match."""
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    found: str | None = matches[-1].group(1 if pattern.groups else 0)
    return found
