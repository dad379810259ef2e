"""Dataset of prompts for rollouts, with the columns that environments use to score completions."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from foundry.config.configured import configured_by
from foundry.config.schemas.data import Arithmetic
from foundry.data.conversations.chat import ChatTemplate, Segment, resolve_chat_template, resolve_stop_ids
from foundry.data.conversations.chats import RowForm, resolve_tokenizer
from foundry.data.conversations.examples import BadRowError, RowStatistics
from foundry.data.conversations.messages import as_messages, check_messages, check_template_columns
from foundry.data.corpora.token_cache import batches
from foundry.data.corpora.tokenizer import encode_texts
from foundry.data.dataset import Dataset
from foundry.data.io.row_source import RowSource, check_rows, find_rows, mix_rows
from foundry.data.io.rows import Row
from foundry.data.mixture import describe_weights, parts_of
from foundry.data.splits import DataSplits, Prompt
from foundry.tasks.post_training.schemas.data import PromptFiles as PromptFilesSettings

_FORMAT = 1
_MAX_SHOWN = 5
_COLUMNS = ("prompt", "messages")


@configured_by(PromptFilesSettings)
def prompt_files(settings: PromptFilesSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of prompts from files whose rows have `prompt` or `messages`, and any other columns.

    The split depends only on the order of the rows.

    Raises:
        ConfigError: there are no files, the tokenizer or chat template does not fit, a row cannot be used (unless bad
            rows are skipped), or no row can be used.
    """
    return prompt_splits(find_rows(settings, _COLUMNS, reads_all=True), settings)


class RowNumbers(Dataset):
    """Dataset whose samples are prompt indices, because prompts are not tensors.

    Args:
        count: number of samples.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `row`, the index itself, () int64."""
        return {"row": torch.tensor(index)}


def prompt_splits(source: RowSource, settings: PromptFilesSettings | Arithmetic) -> DataSplits:
    """Tokenize rows of prompts and build their splits.

    Raises:
        ConfigError: see `prompt_files`.
    """
    seq_len, max_new_tokens = settings.seq_len, settings.max_new_tokens
    tokenizer, end = resolve_tokenizer(source, _FORM, settings)
    template = resolve_chat_template(settings.chat_template, settings.tokenizer, tokenizer, end)
    reader = _Reader(template, tokenizer, seq_len, max_new_tokens, Counter(), [])
    sizes, train = list[int](), list[Prompt]()
    for part in parts_of(source.splits.train):
        train += reader.read(part, first=len(train))
        sizes.append(len(train) - sum(sizes))
    validation = list(reader.read(source.splits.validation))
    statistics = RowStatistics(rows=len(train) + len(validation), skipped=dict(reader.skipped), first=reader.first)
    check_rows(source, statistics, train, validation)
    lengths = np.array([len(prompt.tokens) for prompt in (*train, *validation)])
    description = f"prompts {_FORMAT} {seq_len} {max_new_tokens} {template.source} {dict(template.variables)}"
    identity = f"{description} {source.fingerprint} {tokenizer.to_str()}{describe_weights(source.weights)}"
    notes = _describe(len(train), len(validation), statistics, lengths)
    return DataSplits(
        train=RowNumbers(len(train)),
        validation=RowNumbers(len(validation)),
        fingerprint=hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32],
        content=f"{source.content}-{description}",
        tokens_per_sample=round(float(lengths.mean())) + max_new_tokens,
        max_tokens=seq_len,
        tokenizer=tokenizer,
        mixture=mix_rows(source, sizes if len(sizes) > 1 else [], notes),
        notes=notes,
        prompts=validation,
        train_prompts=train,
        stop_ids=resolve_stop_ids(template, tokenizer, end),
        bos_id=tokenizer.token_to_id(template.variables["bos_token"]),
        chat_template=template.source,
    )


@dataclass(frozen=True)
class _Reader:
    """Converts rows to prompts, and counts the rows that cannot be used."""

    template: ChatTemplate
    tokenizer: Tokenizer
    seq_len: int
    max_new_tokens: int
    skipped: Counter[str]
    first: list[tuple[int, int, str]]

    def read(self, rows: Iterable[Row], first: int = 0) -> Iterator[Prompt]:
        number = first
        for batch in batches(rows):
            rendered = [self._render(row) for row in batch]
            texts = [text for text, _ in filter(None, rendered)]
            ids = iter(encode_texts(self.tokenizer, texts))
            for row, prompt in zip(batch, rendered, strict=True):
                if prompt is not None and self._fits(row, tokens := next(ids)):
                    answer = prompt[1].get("answer")
                    yield Prompt(tuple(tokens), None if answer is None else str(answer), number, prompt[1])
                    number += 1

    def _render(self, row: Row) -> tuple[str, dict[str, Any]] | None:
        """Return the prompt text and the columns of the row, or None if the row cannot be used."""
        try:
            if row.error is not None:
                raise BadRowError("cannot be read", row.error)
            check_template_columns(self.template, row.columns)
            messages, columns = read_prompt(row.columns)
            return _render_prompt(self.template, messages), columns
        except BadRowError as error:
            self._note(row, error.kind, str(error))
            return None

    def _fits(self, row: Row, tokens: Sequence[int]) -> bool:
        max_prompt_tokens = self.seq_len - self.max_new_tokens
        if len(tokens) > max_prompt_tokens:
            reason = f"data.seq_len={self.seq_len} leaves beside a completion of {self.max_new_tokens}"
            self._note(
                row,
                "longer than the context",
                f"has {len(tokens)} tokens, more than the {max_prompt_tokens} that {reason}",
            )
        elif not tokens:
            self._note(row, "no token", "has no token")
        return 0 < len(tokens) <= max_prompt_tokens

    def _note(self, row: Row, kind: str, message: str) -> None:
        self.skipped[kind] += 1
        if len(self.first) < _MAX_SHOWN:
            self.first.append((row.file, row.number, message))


def read_prompt(columns: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages of the prompt, and the columns of the row.

    The prompt is `prompt`, a text or a list of messages, or otherwise `messages`. If the last of `messages` is the
    assistant's, it is removed, and its content becomes `answer` unless the row has that column.

    Raises:
        BadRowError: there is no prompt, or it is empty or has the wrong type.
    """
    prompt_columns = dict(columns)
    if isinstance(
        number := prompt_columns.get("answer"), float
    ):  # integer columns with missing values are often stored as float
        prompt_columns["answer"] = None if math.isnan(number) else int(number) if number.is_integer() else number
    if columns.get("prompt") is not None:
        messages = as_messages(columns["prompt"], "prompt", "user")
    elif columns.get("messages") is not None:
        messages = check_messages(columns["messages"], "messages")
        if messages and messages[-1]["role"] == "assistant":
            prompt_columns.setdefault("answer", messages[-1]["content"])
            messages = messages[:-1]
    else:
        names = ", ".join(sorted(name for name, value in columns.items() if value is not None)) or "none"
        raise BadRowError("without a prompt", f"has neither prompt nor messages (its columns: {names})")
    if not any(message["content"].strip() for message in messages):
        raise BadRowError("empty prompt", "has an empty prompt")
    return messages, prompt_columns


def _render_prompt(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return template.render(messages, for_answer=True)
    except ValueError as error:
        raise BadRowError("does not fit the chat template", str(error)) from None


def _segments(template: ChatTemplate, row: Row) -> list[list[Segment]]:
    """Return the prompt as a segment, to train a tokenizer if the settings name none."""
    return [[Segment(_render_prompt(template, read_prompt(row.columns)[0]), False)]]


_FORM = RowForm(segments=_segments, description="prompts")


def _describe(train: int, validation: int, statistics: RowStatistics, lengths: Any) -> dict[str, Any]:
    """Return the statistics of prompts for plan.json: numbers of rows, and percentiles of tokens per prompt."""
    shares = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").astype(int).tolist()
    return {
        "rows": statistics.rows,
        "skipped_rows": statistics.skipped,
        "train_rows": train,
        "validation_rows": validation,
        "row_tokens": dict(zip(("p50", "p90", "p99", "max"), [*shares, int(lengths.max())], strict=True)),
    }
