"""Text datasets of fixed-length token sequences."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foundry.config.configured import configured_by
from foundry.config.schemas.data import PackingStrategy, Tokenised
from foundry.config.schemas.data import StdlibText as StdlibTextSettings
from foundry.config.schemas.data import TextFiles as TextFilesSettings
from foundry.config.sources import listed_paths
from foundry.core.errors import ConfigError, Violation
from foundry.data.corpora.corpus import Corpus, files_corpus, stdlib_corpus
from foundry.data.corpora.packed_sequences import describe_padding, describe_strategy, mean_tokens, packed_sequences
from foundry.data.corpora.token_cache import tokenize_corpus
from foundry.data.corpora.token_sequences import SequencesOfFiles, TokenSequences
from foundry.data.mixture import describe_sources, describe_weights, mixture_of
from foundry.data.splits import DataSplits


@configured_by(StdlibTextSettings)
def stdlib_text(settings: StdlibTextSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of the source code of the running Python's standard library.

    The split depends only on the names of the files.

    Raises:
        ConfigError: the tokenizer does not fit, or a split is shorter than one sample.
    """
    corpus = stdlib_corpus(held_out=settings.held_out)
    return text_splits(corpus, settings, packing_strategy=settings.packing_strategy)


@configured_by(TextFilesSettings)
def text_files(settings: TextFilesSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of the configured files. A text file is one document; in other files, each row is one.

    The split depends only on the order of the documents. If there is only one document, its end is held out.

    Raises:
        ConfigError: there are no files, a column is missing, the tokenizer does not fit, or a split is shorter than
            one sample.
    """
    paths = listed_paths(settings.path)
    return text_splits(
        files_corpus(settings),
        settings,
        paths=paths,
        weights=settings.weights,
        packing_strategy=settings.packing_strategy,
    )


def text_splits(
    corpus: Corpus,
    settings: Tokenised,
    *,
    paths: Sequence[str] = (),
    weights: Sequence[float] | None = None,
    packing_strategy: PackingStrategy = PackingStrategy.wrapped,
) -> DataSplits:
    """Tokenize a corpus and build splits of fixed-length sequences; no training sequence spans two sources.

    Args:
        corpus: the documents.
        settings: tokenizer, length of a sequence, and cache folder.
        paths: path of each source, for messages; empty for a corpus without files.
        weights: sampling weight of each source; None reads each sample once per epoch.
        packing_strategy: how documents are put into training sequences.

    Raises:
        ConfigError: the tokenizer does not fit, or a split or a source is shorter than one sample.
    """
    tokens, seq_len = tokenize_corpus(corpus, settings), settings.seq_len
    strategy = describe_strategy(packing_strategy)
    sources: Sequence[TokenSequences] = [TokenSequences(source, seq_len) for source in tokens.train]
    if packing_strategy is PackingStrategy.best_fit:
        sources = packed_sequences(
            tokens.train,
            end=tokens.end,
            seq_len=seq_len,
            cache_dir=settings.cache_dir,
            fingerprint=tokens.fingerprint,
        )
    validation = TokenSequences(tokens.validation, seq_len)
    splits = [(f"training text of {path}", source) for path, source in zip(paths, sources, strict=False)]
    splits = splits if len(sources) > 1 else [("training text", sources[0])]
    too_short = [split for split in (*splits, ("validation text", validation)) if not len(split[1])]
    if too_short:
        name, shortest = min(too_short, key=lambda split: len(split[1].tokens))
        raise ConfigError(_too_short(name, len(shortest.tokens), seq_len, is_held_out=shortest is validation))
    notes: dict[str, Any] = asdict(tokens.statistics)
    notes["dropped_train_tokens"] = sum(source.dropped_tokens for source in sources)
    notes |= describe_padding(sources)
    notes["dropped_validation_tokens"] = validation.dropped_tokens
    sizes, mixed = [len(source) for source in sources], describe_weights(weights)
    if len(sources) > 1:
        notes["sources"] = describe_sources(paths, sizes, weights)
    return DataSplits(
        train=sources[0] if len(sources) == 1 else SequencesOfFiles(sources),
        validation=validation,
        fingerprint=f"{tokens.fingerprint}-{seq_len}{mixed}{strategy}",
        content=f"{corpus.content}-{seq_len}{mixed}{strategy}",
        mixture=mixture_of(sizes, weights),
        tokens_per_sample=mean_tokens(sources),
        max_tokens=seq_len,
        tokenizer=tokens.tokenizer,
        stop_ids=(tokens.end,),
        notes=notes,
    )


def _too_short(split: str, tokens: int, seq_len: int, *, is_held_out: bool) -> Violation:
    if tokens < 3 and is_held_out:
        message = f"leaves {tokens} tokens for validation; increase it, set data.validation_path, or give more text"
        return Violation("data.held_out", message)
    remedy = f"set data.seq_len={tokens - 1} or less, or give more text" if tokens > 1 else "give more text"
    message = f"is {seq_len} but the {split} has {tokens} tokens, fewer than the {seq_len + 1} of one sample; {remedy}"
    return Violation("data.seq_len", message)
