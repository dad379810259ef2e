"""Rows of conversations, preferences and prompts, each of its own length."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from foundry.config.schemas.data.base import (
    URLS,
    EncodingErrors,
    Tokenised,
    errors_of_files,
    path_of_files,
    path_of_held_out_files,
    weights_of_files,
)
from foundry.config.setting import OnResume, setting
from foundry.config.sources import check_sources
from foundry.core.errors import Violation, shown

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

LONGEST_ANSWER = "${oc.select:objective.max_new_tokens,0}"
"""What a prompt leaves room for, where the objective generates answers."""
CHAT_TEMPLATES = ("plain", "chatml")
"""Those that foundry has."""


class TrainOn(Enum):
    """Which answers of a conversation are learnt."""

    all = "all"
    last = "last"


class OnBadRow(Enum):
    """What becomes of rows that cannot be used."""

    refuse = "refuse"
    skip = "skip"


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError):  # a name that no file can have, or the folder of no user
        return False


def check_room(seq_len: int, max_new_tokens: int) -> Iterator[Violation]:
    """An answer leaves tokens for its prompt."""
    if max_new_tokens >= seq_len:
        message = f"is {seq_len}, of which an answer of objective.max_new_tokens={max_new_tokens} leaves no prompt"
        yield Violation("data.seq_len", f"{message}; shorten the one or lengthen the other")


@dataclass(frozen=True, kw_only=True)
class Templated(Tokenised):
    """Rows of messages, each of its own length, which a chat template makes text of."""

    is_ragged: ClassVar[bool] = True

    chat_template: str | None = setting(
        None,
        "how conversations become text: plain, chatml, or a file with a Jinja template; null: what lies beside the "
        "tokenizer, else plain",
        on_resume=OnResume.data,
    )

    def check(self) -> Iterator[Violation]:
        """The template is a known one, or a file."""
        yield from super().check()
        template = self.chat_template
        if template not in (None, *CHAT_TEMPLATES) and not _is_file(str(template)):
            message = f"is {shown(template)} but there is no such file; give {', '.join(CHAT_TEMPLATES)} or a file"
            yield Violation("data.chat_template", message)


@dataclass(frozen=True, kw_only=True)
class Packable(Templated):
    """Rows of messages of which several may share a row of tokens."""

    packing: bool = setting(
        False,
        "put several samples of a batch into a row of seq_len tokens, in which none sees another, and several pairs "
        "into two such rows; hparams.per_gpu_batch_size then counts rows, or of pairs twos of rows",
        on_resume=OnResume.same,
        runtime=True,
    )

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Packed samples have lengths of their own, an objective that takes several in a row, and no compiled shape."""
        if not self.packing:
            return
        if not getattr(run.objective, "takes_packed", False):
            name = type(run.objective).__name__
            others = "objective=sft, dpo, distillation or grpo"
            message = f"is true but objective {name} takes one sample a row; set it to false, or choose {others}"
            yield Violation("data.packing", message)
        elif not self.is_ragged:
            message = f"is true but samples of {type(self).__name__} are all of data.seq_len tokens and fill a row each"
            yield Violation("data.packing", f"{message}; set it to false")
        if run.hparams.torchcompile:
            message = "is true together with hparams.torchcompile, which would compile each packed row for itself"
            yield Violation("data.packing", f"{message}; set one of them to false")


@dataclass(frozen=True, kw_only=True)
class Conversations(Packable):
    """Rows of which the model learns what the assistant says."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences", "completions"})

    train_on: TrainOn = setting(TrainOn.all, "which of the assistant's turns are learnt: all or the last")


@dataclass(frozen=True, kw_only=True)
class RowFiles(Packable):
    """Rows of the user's in JSONL, Parquet, Arrow or CSV.

    Attributes:
        known_columns: those that are read.
    """

    known_columns: ClassVar[tuple[str, ...]] = ()
    urls: ClassVar[tuple[str, ...]] = URLS

    path: Any = path_of_files("file, folder or glob of JSONL, Parquet, Arrow or CSV files, or a list of these")
    weights: list[float] | None = weights_of_files()
    validation_path: Any = path_of_held_out_files("files for validation; null: hold out a share of `path`")
    columns: dict[str, str] = setting(
        dict,
        "what columns are called in the files, by their names here, as {prompt: question, completion: answer.text}; "
        "dots lead into others",
    )
    encoding_errors: EncodingErrors = errors_of_files()
    on_bad_row: OnBadRow = setting(
        OnBadRow.refuse,
        "what becomes of rows that are no JSON, hold something else, have no answer or too many tokens: refuse or skip",
    )

    def check(self) -> Iterator[Violation]:
        """There are sources, and a weight for each; columns are known ones."""
        yield from super().check()
        yield from check_sources(self.path, self.validation_path, self.weights)
        for name, called in self.columns.items():
            if name not in self.known_columns:
                known = ", ".join(self.known_columns)
                yield Violation("data.columns", f"has {shown(name)}, which is no column here; there are {known}")
            elif not isinstance(called, str) or not all(called.split(".")):
                yield Violation("data.columns", f"has {shown(called)} for {name}; give a name, with dots between names")


@dataclass(frozen=True, kw_only=True)
class ChatFiles(RowFiles, Conversations):
    """Conversations of the user's in JSONL, Parquet, Arrow or CSV: `messages`, or `prompt` and `completion`."""

    known_columns: ClassVar[tuple[str, ...]] = ("messages", "prompt", "completion")

    _target_: str = "foundry.datasets.chat_files"


@dataclass(frozen=True, kw_only=True)
class PreferenceFiles(RowFiles):
    """Preferences of the user's in files of rows: `prompt`, `chosen` and `rejected`, texts or lists of messages."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "pairs"})
    known_columns: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")

    _target_: str = "foundry.datasets.preference_files"


@dataclass(frozen=True, kw_only=True)
class PromptFiles(RowFiles):
    """Prompts of the user's in files of rows, texts or messages, with other columns for the environment."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "prompts"})
    known_columns: ClassVar[tuple[str, ...]] = ("prompt", "messages", "answer")

    _target_: str = "foundry.datasets.prompt_files"
    max_new_tokens: int = setting(
        LONGEST_ANSWER, "tokens of seq_len that a prompt leaves for its answer: the objective's", ge=0
    )

    def check(self) -> Iterator[Violation]:
        """Prompts have room."""
        yield from super().check()
        yield from check_room(self.seq_len, self.max_new_tokens)
