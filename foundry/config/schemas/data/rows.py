"""Settings of datasets of conversations and other rows of messages, which have different lengths."""

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
from foundry.core.errors import Violation, as_text
from foundry.core.moved_modules import find_moved

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

__getattr__ = find_moved(__name__)

LONGEST_ANSWER = "${oc.select:objective.max_new_tokens,0}"
"""Maximum tokens of a completion, if the objective generates completions; otherwise 0."""
CHAT_TEMPLATES = ("plain", "chatml")
"""Names of the built-in chat templates."""


class TrainOn(Enum):
    """Answers of a conversation that count in the loss."""

    all = "all"
    last = "last"


class OnBadRow(Enum):
    """Handling of rows that cannot be used."""

    refuse = "refuse"
    skip = "skip"


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError):  # invalid file name, or home folder of an unknown user
        return False


def check_room(seq_len: int, max_new_tokens: int) -> Iterator[Violation]:
    """Check that the longest completion leaves tokens for its prompt."""
    if max_new_tokens >= seq_len:
        message = f"is {seq_len} but completions of objective.max_new_tokens={max_new_tokens} leave no room for prompts"
        yield Violation("data.seq_len", f"{message}; increase data.seq_len or lower objective.max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class Templated(Tokenised):
    """Base class of settings for rows of messages that are rendered with a chat template."""

    is_ragged: ClassVar[bool] = True

    chat_template: str | None = setting(
        None,
        "template that renders conversations as text: plain, chatml, or a file with a Jinja template; null: the "
        "template stored with the tokenizer, else plain",
        on_resume=OnResume.data,
    )

    def check(self) -> Iterator[Violation]:
        """Check that the chat template is a built-in one or an existing file."""
        yield from super().check()
        template = self.chat_template
        if template not in (None, *CHAT_TEMPLATES) and not _is_file(str(template)):
            message = f"is {as_text(template)}, which does not exist; give {', '.join(CHAT_TEMPLATES)} or a file"
            yield Violation("data.chat_template", message)


@dataclass(frozen=True, kw_only=True)
class Packable(Templated):
    """Base class of settings for rows of messages that can be packed."""

    packing: bool = setting(
        False,
        "pack several samples of a batch into one row of seq_len tokens, without attention between them; preference "
        "pairs take two rows; hparams.per_gpu_batch_size then counts rows, or pairs of rows",
        on_resume=OnResume.same,
        runtime=True,
    )

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check with `packing`: samples differ in length, the objective takes packed rows, and torch.compile is off."""
        if not self.packing:
            return
        if not getattr(run.objective, "takes_packed", False):
            name = type(run.objective).__name__
            message = f"is true but objective {name} takes one sample per row; set it to false, or use objective=sft"
            yield Violation("data.packing", message)
        elif not self.is_ragged:
            message = f"is true but each sample of {type(self).__name__} has data.seq_len tokens, which fill a row"
            yield Violation("data.packing", f"{message}; set it to false")
        if run.hparams.torchcompile:
            message = "is true together with hparams.torchcompile, which would recompile the model for each packed row"
            yield Violation("data.packing", f"{message}; set one of them to false")


@dataclass(frozen=True, kw_only=True)
class Conversations(Packable):
    """Base class of settings for conversations, with the loss on the assistant's answers."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences", "completions"})

    train_on: TrainOn = setting(TrainOn.all, "assistant turns that count in the loss: all or the last")


@dataclass(frozen=True, kw_only=True)
class RowFiles(Packable):
    """Base class of settings for rows in JSONL, Parquet, Arrow or CSV files.

    Attributes:
        known_columns: foundry's names of the columns that this data reads.
    """

    known_columns: ClassVar[tuple[str, ...]] = ()
    urls: ClassVar[tuple[str, ...]] = URLS

    path: Any = path_of_files("file, folder or glob of JSONL, Parquet, Arrow or CSV files, or a list of these")
    weights: list[float] | None = weights_of_files()
    validation_path: Any = path_of_held_out_files("validation files; null: hold out a fraction of `path`")
    columns: dict[str, str] = setting(
        dict,
        "names of the columns in the files, keyed by foundry's names, as {prompt: question, completion: "
        "answer.text}; dots select nested fields",
    )
    encoding_errors: EncodingErrors = errors_of_files()
    on_bad_row: OnBadRow = setting(
        OnBadRow.refuse,
        "handling of rows that are invalid JSON, have unexpected content, no answer or too many tokens: refuse or skip",
    )

    def check(self) -> Iterator[Violation]:
        """Check the paths and their weights, and that `columns` has known columns and valid column names."""
        yield from super().check()
        yield from check_sources(self.path, self.validation_path, self.weights)
        for name, column in self.columns.items():
            if name not in self.known_columns:
                choices = ", ".join(self.known_columns)
                yield Violation(
                    "data.columns",
                    f"has {as_text(name)}, which is not a column of this data; choose from {choices}",
                )
            elif not isinstance(column, str) or not all(column.split(".")):
                yield Violation(
                    "data.columns",
                    f"has {as_text(column)} for {name} but must have column names, with dots for nested fields",
                )


@dataclass(frozen=True, kw_only=True)
class ChatFiles(RowFiles, Conversations):
    """Your own conversations in JSONL, Parquet, Arrow or CSV files: `messages`, or `prompt` and `completion`."""

    known_columns: ClassVar[tuple[str, ...]] = ("messages", "prompt", "completion")

    _target_: str = "foundry.datasets.chat_files"
