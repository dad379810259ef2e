"""Text as fixed-length sequences of tokens."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foundry.config.schemas.data import EncodingErrors
from foundry.config.sources import listed_paths
from foundry.core.errors import ConfigError, Violation
from foundry.data.corpora.corpus import Corpus, files_corpus, stdlib_corpus
from foundry.data.corpora.token_cache import tokenised
from foundry.data.corpora.token_sequences import SequencesOfFiles, TokenSequences
from foundry.data.mixture import describe_sources, describe_weights, mixture_of
from foundry.data.splits import DataSplits


def stdlib_text(
    *,
    seed: int,
    seq_len: int,
    vocab_size: int,
    tokenizer: str | None,
    held_out: float,
    cache_dir: str,
    num_workers: int = 0,
) -> DataSplits:
    """The sources of the running Python's standard library.

    Args:
        seed: unused: the split depends on file names only.
        seq_len: tokens per sample.
        vocab_size: entries of the tokenizer.
        tokenizer: tokenizer.json or folder to use; None: train one on the training split.
        held_out: share of files for validation.
        cache_dir: folder for tokenizers and token arrays.
        num_workers: unused: the loader's.

    Raises:
        ConfigError: the tokenizer does not fit, or a split is shorter than one sample.
    """
    corpus = stdlib_corpus(held_out=held_out)
    return text_splits(corpus, seq_len=seq_len, vocab_size=vocab_size, tokenizer=tokenizer, cache_dir=cache_dir)


def text_files(
    *,
    seed: int,
    path: str | Sequence[str],
    seq_len: int,
    vocab_size: int,
    tokenizer: str | None,
    held_out: float,
    cache_dir: str,
    text_field: str = "text",
    validation_path: str | Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    encoding_errors: EncodingErrors = EncodingErrors.strict,
    num_workers: int = 0,
) -> DataSplits:
    """The user's own files of text and of rows.

    Args:
        seed: unused: the split depends on the documents' order only.
        path: file, folder or glob, or several; a text file is one document, a row of any other is one.
        seq_len: tokens per sample.
        vocab_size: entries of the tokenizer.
        tokenizer: tokenizer.json or folder to use; None: train one on the training split.
        held_out: share of documents for validation, or of its end where there is one document only.
        cache_dir: folder for tokenizers and token arrays.
        text_field: column or key of the text where files have rows; dots lead into others.
        validation_path: files for validation; None: hold out a share of `path`.
        weights: shares in which several paths are read; None: each sample once an epoch.
        encoding_errors: what becomes of bytes that are not UTF-8.
        num_workers: unused: the loader's.

    Raises:
        ConfigError: no files, a missing column, a tokenizer that does not fit, or a split shorter than one sample.
    """
    corpus = files_corpus(
        path=path,
        text_field=text_field,
        validation_path=validation_path,
        held_out=held_out,
        cache_dir=cache_dir,
        encoding_errors=encoding_errors,
    )
    return text_splits(
        corpus,
        seq_len=seq_len,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        paths=listed_paths(path),
        weights=weights,
    )


def text_splits(
    corpus: Corpus,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: str | None,
    cache_dir: str,
    paths: Sequence[str] = (),
    weights: Sequence[float] | None = None,
) -> DataSplits:
    """Documents as sequences of the same length, none of which goes from one source into the next.

    Raises:
        ConfigError: the tokenizer does not fit, or a split or a source is shorter than one sample.
    """
    tokens = tokenised(corpus, vocab_size=vocab_size, tokenizer=tokenizer, cache_dir=cache_dir)
    sources = [TokenSequences(own, seq_len) for own in tokens.train]
    validation = TokenSequences(tokens.validation, seq_len)
    named = [(f"training text of {path}", own) for path, own in zip(paths, sources, strict=False)]
    named = named if len(sources) > 1 else [("training text", sources[0])]
    what, shorter = min(*named, ("validation text", validation), key=lambda one: len(one[1].tokens))
    if not len(shorter):
        raise ConfigError(_too_short(what, len(shorter.tokens), seq_len, is_held_out=shorter is validation))
    notes: dict[str, Any] = asdict(tokens.statistics)
    notes["dropped_train_tokens"] = sum(own.dropped_tokens for own in sources)
    notes["dropped_validation_tokens"] = validation.dropped_tokens
    sizes, mixed = [len(own) for own in sources], describe_weights(weights)
    if len(sources) > 1:
        notes["sources"] = describe_sources(paths, sizes, weights)
    return DataSplits(
        train=sources[0] if len(sources) == 1 else SequencesOfFiles(sources),
        validation=validation,
        fingerprint=f"{tokens.fingerprint}-{seq_len}{mixed}",
        content=f"{corpus.content}-{seq_len}{mixed}",
        mixture=mixture_of(sizes, weights),
        tokens_per_sample=seq_len,
        tokenizer=tokens.tokenizer,
        stop_ids=(tokens.end,),
        notes=notes,
    )


def _too_short(what: str, tokens: int, seq_len: int, *, is_held_out: bool) -> Violation:
    if tokens < 3 and is_held_out:
        message = (
            f"leaves {tokens} tokens for validation; set a larger share, or give data.validation_path or more text"
        )
        return Violation("data.held_out", message)
    smaller = f"set data.seq_len={tokens - 1} or less, or give more text" if tokens > 1 else "give more text"
    message = f"is {seq_len} but the {what} has {tokens} tokens, less than the {seq_len + 1} of one sample; {smaller}"
    return Violation("data.seq_len", message)
