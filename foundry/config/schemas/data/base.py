"""Base classes and shared settings of the data schemas."""

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
"""Defaults of `tokenizer` and `vocab_size`: the tokenizer and vocabulary size of the pretrained model, if any."""


class EncodingErrors(Enum):
    """Handling of bytes that are not valid UTF-8, with the names of Python's error handlers."""

    strict = "strict"
    replace = "replace"


URLS = ("path", "validation_path")
"""Settings that accept URLs, for data that can be read from URLs."""


def path_of_files(doc: str) -> Any:
    """Return the setting for one or several paths of training files.

    A resumed run can have other paths if the contents of the files are the same.
    """
    return setting("???", doc, path=True, on_resume=OnResume.data)


def path_of_held_out_files(doc: str) -> Any:
    """Return the setting for paths of validation files; null for none."""
    return setting(None, doc, path=True, on_resume=OnResume.data)


def weights_of_files() -> Any:
    """Return the setting for the sampling weights of several paths."""
    doc = "sampling weights of several paths; null: each sample once per epoch"
    return setting(None, doc)


def errors_of_files() -> Any:
    """Return the setting for the handling of bytes that are not valid UTF-8."""
    doc = "handling of invalid UTF-8: strict: refuse the file and name the line; replace: decode it to U+FFFD"
    return setting(EncodingErrors.strict, doc)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Base class of data settings; the number of consumed samples is the complete state of a data loader.

    Attributes:
        words_if: setting that must not be null for samples to contain text; None if samples contain text whenever the
            data has a tokenizer.
    """

    words_if: ClassVar[str | None] = None

    _target_: str
    num_workers: int = setting(
        0,
        "worker processes per rank that prefetch samples; 0: read in the training process",
        ge=0,
        le=1024,
        on_resume=OnResume.same,
        runtime=True,
    )
    cache_dir: str = setting(
        "${oc.env:FOUNDRY_CACHE,.cache/foundry}",
        "cache folder for tokenizers and token arrays",
        on_resume=OnResume.same,
        alone=os.environ.get("FOUNDRY_CACHE", ".cache/foundry"),
    )


@dataclass(frozen=True, kw_only=True)
class Tokenised(Data):
    """Base class of settings for tokenized text.

    Attributes:
        is_ragged: samples have different lengths, up to `seq_len`.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences"})
    is_ragged: ClassVar[bool] = False

    _target_: str
    seq_len: int = setting(
        256,
        "tokens per training sequence; for data with samples of different lengths, their maximum length",
        ge=1,
        le=10**8,
    )
    vocab_size: int = setting(
        MODEL_VOCAB_SIZE,
        "vocabulary size of the byte-level BPE trained on the text, or upper limit for `tokenizer`; default: the "
        "model's in model.path",
        ge=1,
        le=10**8,
        alone=4096,
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "tokenizer.json or its folder; null: train a tokenizer on the training text; default: the model's in "
        "model.path",
        path=True,
        on_resume=OnResume.data,
        alone=None,
    )
    held_out: float = setting(0.05, "fraction of documents or rows held out for validation", gt=0, lt=1)

    @property
    def run_files(self) -> Mapping[str, str]:
        """Files without which a run on this data cannot be opened, each with the kind of run that writes it."""
        return {TOKENIZER: "a run over text"}

    def check(self) -> Iterator[Violation]:
        """Check that a tokenizer trained on the data has room for 256 bytes and the end of a document."""
        if self.tokenizer is None:
            yield from check_entries(self.vocab_size)


def check_entries(vocab_size: int) -> Iterator[Violation]:
    """Check that a byte-level tokenizer has room for 256 bytes and the end of a document."""
    if vocab_size < _BYTES_AND_END:
        message = f"is {vocab_size} but must be at least {_BYTES_AND_END}, for all bytes and the end of a document"
        yield Violation("data.vocab_size", message)
