"""Conversations as examples: what the assistant says is learnt."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from foundry.config.schemas.data import EncodingErrors, OnBadRow, TrainOn
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
from foundry.data.corpora.token_cache import batches, train_with_end, trained_end
from foundry.data.corpora.tokenizer import END_OF_DOCUMENT, load_tokenizer
from foundry.data.images.picture_examples import PictureExamples, PicturePrompts, RowPictures
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.row_source import RowSource, check_rows, find_rows, mix_rows
from foundry.data.io.rows import Row
from foundry.data.mixture import describe_weights
from foundry.data.splits import Dataset, DataSplits, Prompt
from foundry.run_dir.names import TOKENIZER

_COLUMNS = ("messages", "prompt", "completion")


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """What is made of each row.

    Attributes:
        segments: its examples as a chat template renders them; a `BadRowError` says why the row cannot be used.
        described: what tells this form from others.
        are_pairs: a row gives two examples, which make one sample.
    """

    segments: Callable[[ChatTemplate, Row], Sequence[Sequence[Segment]]]
    described: str
    are_pairs: bool = False

    @classmethod
    def conversations(cls, train_on: TrainOn) -> "RowForm":
        """One example of a row's `messages`."""
        segments = partial(_conversation_segments, 1 if train_on is TrainOn.last else None)
        return cls(segments=segments, described=train_on.value)


def chat_files(
    *,
    seed: int,
    path: str | Sequence[str],
    seq_len: int,
    vocab_size: int,
    tokenizer: str | None,
    held_out: float,
    cache_dir: str,
    validation_path: str | Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    chat_template: str | None = None,
    train_on: TrainOn = TrainOn.all,
    columns: Mapping[str, str] | None = None,
    encoding_errors: EncodingErrors = EncodingErrors.strict,
    on_bad_row: OnBadRow = OnBadRow.refuse,
    num_workers: int = 0,
    packing: bool = False,
) -> DataSplits:
    """The user's own conversations: rows of files with `messages`, or with `prompt` and `completion`.

    Args:
        seed: unused: the split depends on the rows' order only.
        path: file, folder or glob, or several.
        seq_len: most tokens of a row.
        vocab_size: entries of the tokenizer.
        tokenizer: tokenizer.json or folder to use; None: train one on the training split.
        held_out: share of rows for validation.
        cache_dir: folder for tokenizers and token arrays.
        validation_path: files for validation; None: hold out a share of `path`.
        weights: shares in which several paths are read; None: each row once an epoch.
        chat_template: as `resolve_chat_template` takes it.
        train_on: which answers are learnt.
        columns: what some columns are called in the files, by their names here; dots lead into others.
        encoding_errors: what becomes of bytes that are not UTF-8.
        on_bad_row: what becomes of rows that cannot be used.
        num_workers: unused: the loader's.
        packing: likewise.

    Raises:
        ConfigError: no files, a tokenizer or template that does not fit, rows that cannot be used, or none that can.
    """
    return chat_splits(
        find_rows(
            path,
            validation_path,
            held_out=held_out,
            cache_dir=cache_dir,
            columns=_COLUMNS,
            weights=weights,
            called=columns,
            encoding_errors=encoding_errors,
        ),
        RowForm.conversations(train_on),
        seq_len=seq_len,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        chat_template=chat_template,
        on_bad_row=on_bad_row,
    )


def chat_splits(
    source: RowSource,
    form: RowForm,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: str | None,
    cache_dir: str,
    chat_template: str | None,
    on_bad_row: OnBadRow,
    pictures: RowPictures | None = None,
) -> DataSplits:
    """Rows of conversations as examples of a form, and with `pictures` about these.

    Args:
        source: the rows.
        form: what is made of each.
        seq_len: as of `chat_files`, as are the arguments not described here.
        vocab_size: see there.
        tokenizer: see there.
        cache_dir: see there.
        chat_template: see there.
        on_bad_row: see there.
        pictures: of the rows; None: they have none.

    Raises:
        ConfigError: as `chat_files`.
    """
    found, end = resolve_tokenizer(source, form, tokenizer, vocab_size, chat_template, cache_dir)
    template = resolve_chat_template(chat_template, tokenizer, found, end)
    described = f"{template.source} {dict(template.variables)} {form.described}"
    encoded = encode_rows(
        lambda: source.splits,
        partial(form.segments, template),
        described=f"{described} {source.fingerprint}",
        tokenizer=found,
        max_tokens=seq_len,
        cache_dir=cache_dir,
        keeps_rows=pictures is not None,
        num_rows=source.num_rows,
        limited=template.limited,
    )
    check_rows(source, encoded.statistics, on_bad_row, encoded.train, encoded.validation)
    fingerprint = f"{encoded.fingerprint}{describe_weights(source.weights)}"
    train: Dataset = encoded.train
    validation: Dataset = encoded.validation
    notes = describe_lengths(encoded.train, encoded.validation, encoded.statistics)
    prompts: Sequence[Prompt] = LastAnswers(encoded.validation, found, every=2 if form.are_pairs else 1)
    if form.are_pairs:
        train, validation = pairs = Pairs(encoded.train), Pairs(encoded.validation)
        notes |= describe_pairs(*pairs)
    if pictures is not None:
        places = [own[rows] for own, rows in zip(pictures.places, encoded.rows, strict=True)]
        train = PictureExamples(encoded.train, pictures.images, places[0])
        validation = seen = PictureExamples(encoded.validation, pictures.images, places[1])
        prompts = PicturePrompts(prompts, seen)
    return DataSplits(
        train=train,
        validation=validation,
        fingerprint=fingerprint,
        mixture=mix_rows(source, encoded.statistics.sources, notes),
        content=f"{source.content}-{seq_len}-{described}",
        max_tokens=seq_len,
        tokens_per_sample=max(1, round(len(encoded.train) / len(train) * float(encoded.train.lengths.mean()))),
        tokenizer=found,
        notes=notes,
        prompts=prompts,
        stop_ids=resolve_stop_ids(template, found, end),
        bos_id=found.token_to_id(template.variables["bos_token"]),
        chat_template=template.source,
    )


def resolve_tokenizer(
    source: RowSource, form: RowForm, path: str | None, vocab_size: int, chat_template: str | None, cache_dir: str
) -> tuple[Tokenizer, int]:
    """A tokenizer and its end of a document; trained on the conversations, from the cache or into it, without a path.

    Raises:
        ConfigError: there is no tokenizer, or it has too many entries.
    """
    if path is not None:
        return load_tokenizer(path, vocab_size)
    template = ChatTemplate(read_template(chat_template), {"eos_token": END_OF_DOCUMENT, "bos_token": ""})

    def fill(folder: Path) -> tuple[str, ...]:
        with template.limited(partial(_texts_of_batch, partial(form.segments, template))) as texts_of_batch:
            texts = (text for batch in batches(source.splits.train) for text in texts_of_batch(batch))
            trained, _ = train_with_end(texts, vocab_size)
        trained.save(str(folder / TOKENIZER))
        return (TOKENIZER,)

    settings = f"tokenizer {vocab_size} {template.source} {form.described} {source.fingerprint}"
    name = hashlib.sha256(settings.encode(errors="surrogateescape")).hexdigest()[:32]
    tokenizer = Tokenizer.from_file(str(cached_folder(cache_dir, name, fill) / TOKENIZER))
    return tokenizer, trained_end(tokenizer)


def _texts_of_batch(encode: Callable[[Row], Sequence[Sequence[Segment]]], rows: Sequence[Row]) -> list[str]:
    """Return the texts from which a tokenizer is trained: those of usable rows, without the end of a document."""
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
