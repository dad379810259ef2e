"""Chat datasets for supervised fine-tuning: the loss covers the assistant's answers."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from foundry.config.configured import configured_by
from foundry.config.schemas.data import ChatFiles as ChatFilesSettings
from foundry.config.schemas.data import Templated, TrainOn
from foundry.data.conversations.chat import (
    ChatTemplate,
    Segment,
    read_template,
    resolve_chat_template,
    resolve_stop_ids,
)
from foundry.data.conversations.examples import (
    BadRowError,
    LastAnswers,
    Pairs,
    describe_lengths,
    describe_pairs,
    encode_rows,
)
from foundry.data.conversations.messages import check_template_columns, read_messages, trained_segments
from foundry.data.corpora.token_cache import batches, train_with_end, trained_end_token
from foundry.data.corpora.tokenizer import END_OF_DOCUMENT, load_tokenizer
from foundry.data.dataset import Dataset
from foundry.data.images.picture_examples import PictureExamples, PicturePrompts, RowPictures
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.row_source import RowSource, check_rows, find_rows, mix_rows
from foundry.data.io.rows import Row
from foundry.data.mixture import describe_weights
from foundry.data.splits import DataSplits, Prompt
from foundry.run_dir.names import TOKENIZER


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """Conversion of a row to examples.

    Attributes:
        segments: returns the examples of a row, as segments rendered by a chat template; raises `BadRowError` if the
            row cannot be used.
        description: text that identifies this form in fingerprints.
        are_pairs: each row has two examples, which form one sample.
    """

    segments: Callable[[ChatTemplate, Row], Sequence[Sequence[Segment]]]
    description: str
    are_pairs: bool = False

    @classmethod
    def conversations(cls, train_on: TrainOn) -> "RowForm":
        """Return the form for conversations, with one example per row.

        Args:
            train_on: train on all answers, or on the last only.
        """
        segments = partial(_conversation_segments, 1 if train_on is TrainOn.last else None)
        return cls(segments=segments, description=train_on.value)


@configured_by(ChatFilesSettings)
def chat_files(settings: ChatFilesSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of conversations from files whose rows have `messages`, or `prompt` and `completion`.

    The split depends only on the order of the rows.

    Raises:
        ConfigError: there are no files, the tokenizer or chat template does not fit, a row cannot be used and
            `on_bad_row` is `refuse`, or a split has no usable row.
    """
    source = find_rows(settings, settings.known_columns)
    return chat_splits(source, RowForm.conversations(settings.train_on), settings)


def chat_splits(
    source: RowSource, form: RowForm, settings: Templated, *, pictures: RowPictures | None = None
) -> DataSplits:
    """Tokenize rows of conversations and build their splits.

    Args:
        source: the rows.
        form: conversion of a row to examples.
        settings: tokenizer, chat template, maximum tokens of a row, and cache folder.
        pictures: images of the rows; None for text only.

    Raises:
        ConfigError: see `chat_files`.
    """
    seq_len = settings.seq_len
    tokenizer, end = resolve_tokenizer(source, form, settings)
    template = resolve_chat_template(settings.chat_template, settings.tokenizer, tokenizer, end)
    description = f"{template.source} {dict(template.variables)} {form.description}"
    encoded = encode_rows(
        lambda: source.splits,
        partial(form.segments, template),
        description=f"{description} {source.fingerprint}",
        tokenizer=tokenizer,
        max_tokens=seq_len,
        cache_dir=settings.cache_dir,
        keeps_rows=pictures is not None,
        num_rows=source.num_rows,
        limited=template.limited,
    )
    check_rows(source, encoded.statistics, encoded.train, encoded.validation)
    fingerprint = f"{encoded.fingerprint}{describe_weights(source.weights)}"
    train: Dataset = encoded.train
    validation: Dataset = encoded.validation
    notes = describe_lengths(encoded.train, encoded.validation, encoded.statistics)
    prompts: Sequence[Prompt] = LastAnswers(encoded.validation, tokenizer, every=2 if form.are_pairs else 1)
    if form.are_pairs:
        train, validation = pairs = Pairs(encoded.train), Pairs(encoded.validation)
        notes |= describe_pairs(*pairs)
    if pictures is not None:
        places = [indices[rows] for indices, rows in zip(pictures.places, encoded.rows, strict=True)]
        train = PictureExamples(encoded.train, pictures.images, places[0])
        validation = seen = PictureExamples(encoded.validation, pictures.images, places[1])
        prompts = PicturePrompts(prompts, seen)
    return DataSplits(
        train=train,
        validation=validation,
        fingerprint=fingerprint,
        mixture=mix_rows(source, encoded.statistics.sources, notes),
        content=f"{source.content}-{seq_len}-{description}",
        max_tokens=seq_len,
        tokens_per_sample=max(1, round(len(encoded.train) / len(train) * float(encoded.train.lengths.mean()))),
        tokenizer=tokenizer,
        notes=notes,
        prompts=prompts,
        stop_ids=resolve_stop_ids(template, tokenizer, end),
        bos_id=tokenizer.token_to_id(template.variables["bos_token"]),
        chat_template=template.source,
    )


def resolve_tokenizer(source: RowSource, form: RowForm, settings: Templated) -> tuple[Tokenizer, int]:
    """Return the tokenizer and the id of its end-of-document token.

    If the settings name no tokenizer, one is trained on the training rows and cached.

    Raises:
        ConfigError: the tokenizer, the chat template or a file cannot be read, or the tokenizer has too many entries.
    """
    vocab_size = settings.vocab_size
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer, vocab_size)
    template = ChatTemplate(read_template(settings.chat_template), {"eos_token": END_OF_DOCUMENT, "bos_token": ""})

    def fill(folder: Path) -> tuple[str, ...]:
        with template.limited(partial(_texts_of_batch, partial(form.segments, template))) as texts_of_batch:
            texts = (text for batch in batches(source.splits.train) for text in texts_of_batch(batch))
            trained, _ = train_with_end(texts, vocab_size)
        trained.save(str(folder / TOKENIZER))
        return (TOKENIZER,)

    description = f"tokenizer {vocab_size} {template.source} {form.description} {source.fingerprint}"
    name = hashlib.sha256(description.encode(errors="surrogateescape")).hexdigest()[:32]
    tokenizer = Tokenizer.from_file(str(cached_folder(settings.cache_dir, name, fill) / TOKENIZER))
    return tokenizer, trained_end_token(tokenizer)


def _texts_of_batch(encode: Callable[[Row], Sequence[Sequence[Segment]]], rows: Sequence[Row]) -> list[str]:
    """Return the texts of usable rows without end-of-document tokens, to train a tokenizer."""
    texts = list[str]()
    for row in rows:
        try:
            examples = encode(row)
        except BadRowError:
            continue
        texts += [segment.text.replace(END_OF_DOCUMENT, "") for segments in examples for segment in segments]
    return texts


def _conversation_segments(num_trained: int | None, template: ChatTemplate, row: Row) -> list[list[Segment]]:
    check_template_columns(template, row.columns)
    return [trained_segments(template, read_messages(row.columns), num_trained)]
