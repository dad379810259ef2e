"""`data=`: preferences and prompts in your own files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from foundry.config.schemas.data.rows import LONGEST_ANSWER, RowFiles, check_room
from foundry.config.setting import setting
from foundry.core.errors import Violation


@dataclass(frozen=True, kw_only=True)
class PreferenceFiles(RowFiles):
    """Your own preferences in files of rows: `prompt`, `chosen` and `rejected`, texts or lists of messages."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "pairs"})
    known_columns: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")

    _target_: str = "foundry.datasets.preference_files"


@dataclass(frozen=True, kw_only=True)
class PromptFiles(RowFiles):
    """Your own prompts in files of rows, texts or messages, with other columns for the environment."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "prompts"})
    known_columns: ClassVar[tuple[str, ...]] = ("prompt", "messages", "answer")

    _target_: str = "foundry.datasets.prompt_files"
    max_new_tokens: int = setting(
        LONGEST_ANSWER, "tokens of seq_len reserved for the completion; default: objective.max_new_tokens", ge=0
    )

    def check(self) -> Iterator[Violation]:
        """Check that completions leave room for prompts."""
        yield from super().check()
        yield from check_room(self.seq_len, self.max_new_tokens)
