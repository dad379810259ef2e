"""Settings of datasets of fixed-length token sequences."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from foundry.config.schemas.data.base import (
    MODEL_TOKENIZER,
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
from foundry.core.errors import Violation


class PackingStrategy(Enum):
    """Method of putting documents into training sequences, with names of TRL and of the literature."""

    wrapped = "wrapped"
    best_fit = "best_fit"


@dataclass(frozen=True, kw_only=True)
class Text(Tokenised):
    """Base class of settings for token sequences that are cut from documents."""

    packing_strategy: PackingStrategy = setting(
        PackingStrategy.wrapped,
        "how documents are put into training sequences: wrapped: cut the joined documents every seq_len tokens; "
        "best_fit: keep each document of up to seq_len tokens in one sequence, divide only longer documents, and pad",
        since="0.1.0",
    )

    @property
    def is_ragged(self) -> bool:  # type: ignore[override] # a property, because padding depends on the strategy
        """True if training sequences have padding, so that their numbers of tokens differ."""
        return self.packing_strategy is PackingStrategy.best_fit


@dataclass(frozen=True, kw_only=True)
class StdlibText(Text):
    """Source code of the standard library of the running Python."""

    _target_: str = "foundry.datasets.stdlib_text"


@dataclass(frozen=True, kw_only=True)
class TextFiles(Text):
    """Your own text, JSONL, Parquet, Arrow or CSV files."""

    urls: ClassVar[tuple[str, ...]] = URLS

    _target_: str = "foundry.datasets.text_files"

    path: Any = path_of_files("file, folder or glob of text, JSONL, Parquet, Arrow or CSV files, or a list of these")
    weights: list[float] | None = weights_of_files()
    text_field: str = setting(
        "text",
        "column or key of the text in files of rows; dots select nested fields, as in message.text",
    )
    encoding_errors: EncodingErrors = errors_of_files()
    validation_path: Any = path_of_held_out_files("validation files; null: hold out a fraction of `path`")

    def check(self) -> Iterator[Violation]:
        """Check the paths and their weights."""
        yield from super().check()
        yield from check_sources(self.path, self.validation_path, self.weights)


class TokenDtype(Enum):
    """Dtype of the tokens in files without a header."""

    uint16 = "uint16"
    uint32 = "uint32"
    int32 = "int32"
    int64 = "int64"


@dataclass(frozen=True, kw_only=True)
class TokenFiles(Text):
    """Tokens written by another program: .bin of nanoGPT or llm.c, .bin with .idx of Megatron-LM, or NumPy's .npy."""

    urls: ClassVar[tuple[str, ...]] = URLS

    _target_: str = "foundry.datasets.token_files"

    path: Any = path_of_files(
        "file, folder or glob of .bin files (Megatron-LM's with their .idx) or .npy files, or a list of these"
    )
    weights: list[float] | None = weights_of_files()
    validation_path: Any = path_of_held_out_files("validation files; null: hold out the end of each file")
    dtype: TokenDtype = setting(
        TokenDtype.uint16, "dtype of the tokens in .bin files that do not declare it in a header or an .idx file"
    )
    vocab_size: int = setting(
        "${model_vocab_size:50304}",
        "vocabulary size of the model; all tokens must be smaller",
        ge=1,
        le=10**8,
        alone=50304,
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "tokenizer.json or its folder, to decode text samples; null: no text samples",
        path=True,
        on_resume=OnResume.data,
        alone=None,
    )
    held_out: float = setting(0.05, "fraction at the end of each file held out for validation", gt=0, lt=1)

    def check(self) -> Iterator[Violation]:
        """Check the paths and their weights, and that the end of a document is known if the strategy requires it.

        The vocabulary can have any size, because nothing is tokenized.
        """
        if self.packing_strategy is PackingStrategy.best_fit and self.tokenizer is None:
            message = (
                "is best_fit but without data.tokenizer the token that ends a document is unknown; set data.tokenizer"
            )
            yield Violation("data.packing_strategy", message)
        yield from check_sources(self.path, self.validation_path, self.weights)
