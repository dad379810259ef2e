"""What all data has, and what all tokens of text have."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from foundry.config.setting import OnResume, setting
from foundry.core.errors import Violation
from foundry.run_dir.names import TOKENIZER

_BYTES_AND_END = 257
MODEL_TOKENIZER, MODEL_VOCAB_SIZE = "${model_folder:}", "${model_vocab_size:4096}"
"""What a tokenizer and its size are where nobody gives them: the model's, where it has them."""


class EncodingErrors(Enum):
    """What becomes of bytes that are not UTF-8, by the names that Python has for it."""

    strict = "strict"
    replace = "replace"


URLS = ("path", "validation_path")
"""Settings that may be URLs, of data that reads such."""


def path_of_files(doc: str) -> Any:
    """Where samples lie, one path or several; whether a resumed run may have them elsewhere, their content tells."""
    return setting("???", doc, path=True, on_resume=OnResume.data)


def path_of_held_out_files(doc: str) -> Any:
    """Likewise of those that are held out; null: there are none."""
    return setting(None, doc, path=True, on_resume=OnResume.data)


def weights_of_files() -> Any:
    """The shares of several paths."""
    doc = "shares in which the samples of several paths are read; null: each sample once an epoch"
    return setting(None, doc)


def errors_of_files() -> Any:
    """What becomes of bytes that are not UTF-8."""
    doc = "of bytes that are not UTF-8: strict refuses the file, with the line; replace puts U+FFFD in their place"
    return setting(EncodingErrors.strict, doc)


@dataclass(frozen=True, kw_only=True)
class Data:
    """How samples are read; a loader's whole state is the number of samples consumed.

    Attributes:
        words_if: name of the setting without which samples have no words; None: they have some where there is a
            tokenizer.
    """

    words_if: ClassVar[str | None] = None

    _target_: str
    num_workers: int = setting(
        0,
        "processes per rank that read samples ahead; 0: read in the training process",
        ge=0,
        le=1024,
        on_resume=OnResume.same,
        runtime=True,
    )
    cache_dir: str = setting(
        "${oc.env:FOUNDRY_CACHE,.cache/foundry}",
        "folder for tokenizers and token arrays",
        on_resume=OnResume.same,
        alone=os.environ.get("FOUNDRY_CACHE", ".cache/foundry"),
    )


@dataclass(frozen=True, kw_only=True)
class Tokenised(Data):
    """Tokens of text of any kind.

    Attributes:
        is_ragged: whether samples have lengths of their own, of which `seq_len` is the most.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences"})
    is_ragged: ClassVar[bool] = False

    _target_: str
    seq_len: int = setting(
        256,
        "tokens per training sequence; of data with rows of their own lengths the most that one may have",
        ge=1,
        le=10**8,
    )
    vocab_size: int = setting(
        MODEL_VOCAB_SIZE,
        "entries of the byte-level BPE trained on the text, or most of `tokenizer`; default: the model's in model.path",
        ge=1,
        le=10**8,
        alone=4096,
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "tokenizer.json or folder to use; null: train one on the training text; model.path brings its own",
        path=True,
        on_resume=OnResume.data,
        alone=None,
    )
    held_out: float = setting(0.05, "share of documents or rows kept for validation", gt=0, lt=1)

    @property
    def run_files(self) -> Mapping[str, str]:
        """Files that a run directory must have, each with the kind of run that writes it."""
        return {TOKENIZER: "a run over text"}

    def check(self) -> Iterator[Violation]:
        """A byte-level tokenizer has an entry for each byte and one for the end of a document."""
        if self.tokenizer is None:
            yield from check_entries(self.vocab_size)


def check_entries(vocab_size: int) -> Iterator[Violation]:
    """A byte-level tokenizer has an entry for each byte and one for the end of a document."""
    if vocab_size < _BYTES_AND_END:
        message = f"is {vocab_size} but must be at least {_BYTES_AND_END}: a byte each and the end of a document"
        yield Violation("data.vocab_size", message)
