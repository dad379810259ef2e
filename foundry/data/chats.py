"""Conversations as examples: what the assistant says is learnt."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from foundry.config.errors import ConfigError, Violation, shown
from foundry.config.schemas.data import EncodingErrors, OnBadRow, TrainOn
from foundry.config.sources import listed_paths
from foundry.data.cached_folder import cached_folder
from foundry.data.chat import ChatTemplate, Segment, read_template, resolve_chat_template, resolve_stop_ids
from foundry.data.corpus import PATH, VALIDATION_PATH, HeldOutNumbers, find_corpus_files
from foundry.data.examples import (
    BadRowError,
    LastAnswers,
    Pairs,
    RowStatistics,
    describe_lengths,
    describe_pairs,
    encode_rows,
    list_skipped,
)
from foundry.data.files import ROWS, Utf8
from foundry.data.mixture import Interleaved, Mixture, Sources, describe_sources, describe_weights, mixture_of
from foundry.data.picture_examples import PictureExamples, PicturePrompts, RowPictures
from foundry.data.rows import FileRows, Row, RowSplits
from foundry.data.splits import Dataset, DataSplits, Prompt
from foundry.data.token_cache import batches, train_with_end, trained_end
from foundry.data.tokenizer import END_OF_DOCUMENT, load_tokenizer
from foundry.run_dir.names import TOKENIZER

_COLUMNS = ("messages", "prompt", "completion")
_FOR_TEMPLATE = ("tools", "chat_template_kwargs", "documents")
"""Columns that transformers passes to a chat template besides the messages; not supported here."""
_WEIGHTS = ("weight", "train", "training", "train_detail")
"""Keys by which other programs weight or mask an answer in the loss; not supported here."""
log = logging.getLogger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Rows by split, and what tells them from others.

    Attributes:
        splits: rows that are read when iterated.
        places: what their files are called, for what is wrong with them.
        key: the setting that is wrong then.
        remedy: what to do about it.
        fingerprint: of their contents, names and split.
        content: the same without the names of files.
        paths: of the sources, where several are read.
        weights: shares in which they are read; None: each row once an epoch.
        num_rows: counts all rows; None: nobody has.
    """

    splits: RowSplits
    places: Sequence[str]
    fingerprint: str
    content: str
    paths: Sequence[str] = ()
    weights: Sequence[float] | None = None
    num_rows: Callable[[], int] | None = None
    key: str = PATH
    remedy: str = "repair them, or set data.on_bad_row=skip"


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


def find_rows(
    path: str | Sequence[str],
    validation_path: str | Sequence[str] | None,
    *,
    held_out: float,
    cache_dir: str,
    columns: tuple[str, ...],
    reads_all: bool = False,
    weights: Sequence[float] | None = None,
    called: Mapping[str, str] | None = None,
    encoding_errors: EncodingErrors = EncodingErrors.strict,
) -> RowSource:
    """Rows of the user's files, a share of them held out where there are no files for that; see `FileRows`.

    Those of several paths to learn from are `Sources`, those held out at even distances of all.

    Args:
        path: as of `chat_files`, as are the arguments not described here.
        validation_path: see there.
        held_out: see there.
        cache_dir: see there.
        columns: as of `FileRows`, as are `reads_all` and `called`.
        reads_all: see there.
        weights: see `chat_files`.
        called: see `FileRows`.
        encoding_errors: see `chat_files`.

    Raises:
        ConfigError: there are no files, kinds are mixed, or one cannot be read; or there are too few rows.
    """
    utf8, called = Utf8(encoding_errors.value), dict(called or {})
    settings = f"rows {held_out}{f' {sorted(called.items())}' if called else ''}"
    settings += "" if utf8.is_strict else f" {utf8.errors}"
    found = find_corpus_files(path, validation_path, settings=settings, cache_dir=cache_dir, kinds=ROWS)
    places = list[str]()
    rows, held = list[FileRows](), list[FileRows]()
    for key, sources, of_split in ((PATH, found.train, rows), (VALIDATION_PATH, found.validation, held)):
        for files in sources:
            of_split.append(FileRows(files, columns, key, len(places), reads_all, called, utf8, also=_FOR_TEMPLATE))
            places += map(str, files)
    train: list[Iterable[Row]] = [each if held else _Share(each, held_out, is_held=False) for each in rows]
    validation: list[Iterable[Row]] = [*held] or [_Share(each, held_out, is_held=True) for each in rows]
    return RowSource(
        splits=RowSplits(
            train[0] if len(train) == 1 else Sources(train),
            validation[0] if len(validation) == 1 else Interleaved(validation),
        ),
        places=places,
        fingerprint=found.fingerprint,
        content=f"{found.content}{describe_weights(weights)}",
        paths=listed_paths(path),
        weights=weights,
        num_rows=None if held else lambda: sum(each.count for each in rows),
    )


@dataclass(frozen=True)
class _Share:
    """The rows that are held out, or the others; they are counted before they are read."""

    rows: FileRows
    held_out: float
    is_held: bool

    def __iter__(self) -> Iterator[Row]:
        count = self.rows.count
        if count < 2:
            message = f"{self.rows.files[0]} has {'one row' if count else 'no rows'}; give at least two, or more files"
            raise ConfigError(Violation(PATH, message))
        held = HeldOutNumbers.choose(count, self.held_out)
        for index, row in enumerate(self.rows):
            if (index in held) == self.is_held:
                yield row


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
        tokens_per_sample=max(1, round(len(encoded.train) / len(train) * float(encoded.train.lengths.mean()))),
        tokenizer=found,
        notes=notes,
        prompts=prompts,
        stop_ids=resolve_stop_ids(template, found, end),
        bos_id=found.token_to_id(template.variables["bos_token"]),
        chat_template=template.source,
    )


def mix_rows(source: RowSource, sizes: Sequence[int], notes: dict[str, Any]) -> Mixture | None:
    """The mixture of the rows of several sources, of which `notes` then speak.

    Raises:
        ConfigError: one has no row to learn from.
    """
    if not sizes:
        return None
    if 0 in sizes:
        message = f"{source.paths[list(sizes).index(0)]} leaves no row for training; give more rows that can be used"
        raise ConfigError(Violation(PATH, message))
    notes["sources"] = describe_sources(source.paths, sizes, source.weights)
    return mixture_of(sizes, source.weights)


def check_rows(
    source: RowSource, statistics: RowStatistics, on_bad_row: OnBadRow, train: Sized, validation: Sized
) -> None:
    """Refuse rows that cannot be used, or warn of them, and splits without any.

    Raises:
        ConfigError: of those.
    """
    if statistics.skipped:
        counted, first = list_skipped(statistics, source.places)
        if on_bad_row is OnBadRow.refuse:
            raise ConfigError(Violation(source.key, line) for line in [*first, f"{counted}; {source.remedy}"])
        log.warning("%s and are skipped, such as %s", counted, first[0])
    for name, split in (("training", train), ("validation", validation)):
        if not len(split):
            raise ConfigError(Violation(PATH, f"leaves no row for {name}; give more rows that can be used"))


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


def check_template_columns(template: ChatTemplate, columns: Mapping[str, Any]) -> None:
    """Refuse a row with tools or other variables for the chat template.

    Raises:
        BadRowError: the row has one.
    """
    for name in _FOR_TEMPLATE:
        value = columns.get(name)
        is_empty = not value or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))
        # Many rows have documents that are not for the template.
        if not is_empty and (name != "documents" or name in template.source):
            message = f"has {name}, but the chat template is given messages only; write them into a message of the row"
            raise BadRowError(f"with {name}", message)


def trained_segments(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], num_trained: int | None
) -> list[Segment]:
    """A conversation whose last answers are trained; None: all are.

    Raises:
        BadRowError: there is no answer, one of these is empty or has a weight, or the template does not take the
            messages.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages)) or "none"
        raise BadRowError("no assistant turn", f"has no assistant turn (its roles: {roles})")
    for answer in answers[-(num_trained or 0) :]:
        if not answer["content"].strip():
            raise BadRowError("empty answer", "has an empty answer")
        if weighted := [name for name in _WEIGHTS if name in answer and answer[name] != 1]:
            message = f"has {weighted[0]}={shown(answer[weighted[0]])} in an answer, but all are learnt alike; end the "
            message += "conversation before it, or set data.train_on=last if only the last one is to be learnt"
            raise BadRowError(f"with {weighted[0]} in an answer", message)
    try:
        return template.segments(messages, num_trained=num_trained)
    except ValueError as error:
        raise BadRowError("does not fit the chat template", str(error)) from None


def read_messages(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row: `messages`, or one that asks, `prompt`, and one that answers, `completion`.

    Raises:
        BadRowError: there are none, or something is of another type.
    """
    if columns.get("messages") is not None:
        return checked_messages(columns["messages"], "messages")
    missing = [name for name in ("prompt", "completion") if columns.get(name) is None]
    if missing:
        listed = ", ".join(sorted(name for name, value in columns.items() if value is not None)) or "none"
        message = f"has neither messages nor {' and '.join(missing)} (its columns: {listed})"
        raise BadRowError("without a conversation", message)
    prompt, completion = columns["prompt"], columns["completion"]
    return [*as_messages(prompt, "prompt", "user"), *as_messages(completion, "completion", "assistant")]


def as_messages(value: Any, name: str, role: str) -> list[dict[str, Any]]:
    """A text as one message of a role, or a list of messages as they are.

    Raises:
        BadRowError: it is neither.
    """
    if isinstance(value, str):
        return checked_messages([{"role": role, "content": value}], name)
    return checked_messages(value, name)


def checked_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages of which each is an object with the texts `role` and `content`; keys that are null are left out.

    Raises:
        BadRowError: they are not.
    """
    if not isinstance(value, list):
        raise BadRowError("wrong type", f"has {type(value).__name__} as {name}, not a list of messages")
    messages = list[dict[str, Any]]()
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise BadRowError("wrong type", f"has {type(message).__name__} as message {number}, not an object")
        for key in ("role", "content"):
            text = message.get(key)
            if not isinstance(text, str):
                kind = "no" if text is None else f"{type(text).__name__} as"
                raise BadRowError("wrong type", f"has {kind} {key} in message {number}, not a text")
            try:
                text.encode()
            except UnicodeEncodeError:
                what = f"has half of a surrogate pair in message {number}, which is no text"
                raise BadRowError("wrong type", what) from None
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages
