"""Tokenised corpora on disk: built once, shared by every rank and run."""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer

from foundry.config.errors import ConfigError, Violation
from foundry.data.corpus import Corpus
from foundry.data.sealed_folder import find_damage, publish, seal, sweep_temporaries, temporary_for
from foundry.data.token_sequences import TokenArray
from foundry.data.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_tokenizer, usual_end
from foundry.run_dir.files import read_text
from foundry.run_dir.lock import LOCK, lock

_FORMAT = 1
_TOKENIZER = "tokenizer.json"
_TRAIN = "train.npy"
_VALIDATION = "validation.npy"
_STATISTICS = "statistics.json"
log = logging.getLogger(__name__)
_DOCUMENTS_PER_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Facts of a tokenised corpus.

    Attributes:
        documents: of both splits.
        train_tokens, validation_tokens: ends of documents included.
        unigram_entropy: nats per held-out token under the unigram distribution of the training tokens, with one
            added to every count: what a model reaches that knows frequencies and nothing else.
    """

    documents: int
    train_tokens: int
    validation_tokens: int
    unigram_entropy: float


@dataclass(frozen=True)
class TokenisedCorpus:
    """A published cache folder, its arrays memory-mapped; the token `end` ends each document."""

    fingerprint: str
    tokenizer: Tokenizer
    end: int
    train: TokenArray
    validation: TokenArray
    statistics: TokenStatistics


def tokenised(corpus: Corpus, *, vocab_size: int, tokenizer: str | None, cache_dir: str) -> TokenisedCorpus:
    """The corpus as tokens, from the cache or into it.

    Any number of processes may ask at once: one builds and publishes by an atomic rename, the others wait for it.

    Args:
        corpus: documents by split.
        vocab_size: entries of the BPE trained on the training split, or most that `tokenizer` may have.
        tokenizer: tokenizer.json or folder to use instead of training one.
        cache_dir: the cache's parent folder.

    Raises:
        ConfigError: the tokenizer cannot be read or is larger than vocab_size, a document cannot be read, or the cache
            cannot be written.
    """
    chosen = None if tokenizer is None else load_tokenizer(tokenizer, vocab_size)
    described = "" if chosen is None else chosen[0].to_str()
    if chosen is not None and chosen[1] != usual_end(chosen[0]):
        described += f" {chosen[1]}"
    # The order of a run is drawn from it, so it stays what it was for runs that are resumed.
    settings = f"{_FORMAT} {vocab_size} {described} {corpus.fingerprint}"
    fingerprint = hashlib.sha256(settings.encode()).hexdigest()[:32]
    folder = Path(cache_dir).expanduser().resolve() / fingerprint
    try:
        if (damage := find_damage(folder)) is not None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock"), mode=0o666):
                if (damage := find_damage(folder)) is not None:
                    if damage:
                        log.warning("%s: %s; the tokens are made again", folder, damage)
                    _build(folder, corpus, vocab_size, chosen)
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"is {cache_dir}, where tokens cannot be kept: {reason}; set another, here or in FOUNDRY_CACHE"
        raise ConfigError(Violation("data.cache_dir", message)) from error
    found = Tokenizer.from_file(str(folder / _TOKENIZER))
    return TokenisedCorpus(
        fingerprint,
        found,
        _trained_end(found) if chosen is None else chosen[1],
        np.load(folder / _TRAIN, mmap_mode="r", allow_pickle=False),
        np.load(folder / _VALIDATION, mmap_mode="r", allow_pickle=False),
        TokenStatistics(**json.loads(read_text(folder / _STATISTICS))),
    )


def _build(folder: Path, corpus: Corpus, vocab_size: int, chosen: tuple[Tokenizer, int] | None) -> None:
    """Make the folder, whole and on the disk, or nothing; the lock is held."""
    sweep_temporaries(folder.parent)
    train_texts, validation_texts = corpus.read()
    tokenizer, end = chosen or _trained(train_texts, vocab_size)
    temporary = temporary_for(folder)
    with ExitStack() as held:
        held.callback(shutil.rmtree, temporary, ignore_errors=True)
        lock(temporary, held)  # says to others that somebody is at work
        tokenizer.save(str(temporary / _TOKENIZER))
        train_documents, train = _encode(train_texts, tokenizer, end, temporary / _TRAIN)
        validation_documents, validation = _encode(validation_texts, tokenizer, end, temporary / _VALIDATION)
        statistics = TokenStatistics(
            documents=train_documents + validation_documents,
            train_tokens=len(train),
            validation_tokens=len(validation),
            unigram_entropy=unigram_entropy(train, validation, tokenizer.get_vocab_size()),
        )
        (temporary / _STATISTICS).write_text(json.dumps(asdict(statistics)))
        seal(temporary, (_TOKENIZER, _TRAIN, _VALIDATION, _STATISTICS))
        temporary.chmod(0o755)
        (temporary / LOCK).unlink()
        publish(temporary, folder)


def _trained(texts: Iterable[str], vocab_size: int) -> tuple[Tokenizer, int]:
    tokenizer = train_tokenizer(texts, vocab_size)
    return tokenizer, _trained_end(tokenizer)


def _trained_end(tokenizer: Tokenizer) -> int:
    end: int | None = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end is not None
    return end


def _encode(texts: Iterable[str], tokenizer: Tokenizer, end: int, file: Path) -> tuple[int, TokenArray]:
    """Write the tokens of all documents, each ended by the token `end`; their number and one array."""
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    raw = file.with_suffix(".raw")
    documents, length = 0, 0
    with raw.open("wb") as stream:
        for batch in _batches(texts):
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                tokens = np.array([*encoding.ids, end], dtype)
                stream.write(tokens.tobytes())
                documents, length = documents + 1, length + len(tokens)
    # The header needs the length, which is known only now; copying maps keeps memory independent of the corpus.
    array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(length,))
    if length:
        array[:] = np.memmap(raw, dtype, mode="r", shape=(length,))
    array.flush()
    raw.unlink()
    return documents, array


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, _DOCUMENTS_PER_BATCH)):
        yield batch


def unigram_entropy(train: TokenArray, held_out: TokenArray, vocab_size: int) -> float:
    """Cross-entropy in nats of the held-out tokens under the training tokens' add-one unigram distribution."""
    counts = np.bincount(train, minlength=vocab_size) + 1
    log_probabilities = np.log(counts / counts.sum())
    return float(-log_probabilities[held_out].mean()) if len(held_out) else float("nan")
