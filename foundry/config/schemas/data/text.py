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


@dataclass(frozen=True, kw_only=True)
class Text(Tokenised):
    """Base class of settings for fixed-length token sequences."""


@dataclass(frozen=True, kw_only=True)
class StdlibText(Text):
    """The sources of the running Python's standard library."""

    _target_: str = "foundry.datasets.stdlib_text"


@dataclass(frozen=True, kw_only=True)
class TextFiles(Text):
    """Text, JSONL, Parquet, Arrow or CSV files of the user's."""

    urls: ClassVar[tuple[str, ...]] = URLS

    _target_: str = "foundry.datasets.text_files"

    path: Any = path_of_files("file, folder or glob of text, JSONL, Parquet, Arrow or CSV files, or a list of these")
    weights: list[float] | None = weights_of_files()
    text_field: str = setting(
        "text",
        "column or key that holds the text where files have rows; dots lead into others, as message.text",
    )
    encoding_errors: EncodingErrors = errors_of_files()
    validation_path: Any = path_of_held_out_files("files for validation; null: hold out a share of `path`")

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
    """Tokens that another program has made: .bin of nanoGPT or llm.c, or NumPy's .npy."""

    urls: ClassVar[tuple[str, ...]] = URLS

    _target_: str = "foundry.datasets.token_files"

    path: Any = path_of_files("file, folder or glob of .bin or .npy files, or a list of these")
    weights: list[float] | None = weights_of_files()
    validation_path: Any = path_of_held_out_files("files for validation; null: hold out the end of each file")
    dtype: TokenDtype = setting(TokenDtype.uint16, "of the numbers in .bin files, which do not say it")
    vocab_size: int = setting(
        "${model_vocab_size:50304}", "entries of the model; all tokens are below", ge=1, le=10**8, alone=50304
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "tokenizer.json or folder that the tokens are of, for samples; null: there are none",
        path=True,
        on_resume=OnResume.data,
        alone=None,
    )
    held_out: float = setting(0.05, "share of the end of each file kept for validation", gt=0, lt=1)

    def check(self) -> Iterator[Violation]:
        """Check the paths and their weights.

        The vocabulary can have any size, because nothing is tokenized.
        """
        yield from check_sources(self.path, self.validation_path, self.weights)
