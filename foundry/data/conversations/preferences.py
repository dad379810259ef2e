"""Preferences as examples: two answers to the same prompt, of which one is better."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from foundry.config.schemas.data import EncodingErrors, OnBadRow
from foundry.data.conversations.chat import ChatTemplate, Segment
from foundry.data.conversations.chats import RowForm, chat_splits
from foundry.data.conversations.examples import BadRowError
from foundry.data.conversations.messages import as_messages, check_template_columns, trained_segments
from foundry.data.io.row_source import find_rows
from foundry.data.io.rows import Row
from foundry.data.splits import DataSplits

_COLUMNS = ("prompt", "chosen", "rejected")
_KINDS = ("chosen", "rejected")

Conversation = list[dict[str, Any]]


def preference_files(
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
    columns: Mapping[str, str] | None = None,
    encoding_errors: EncodingErrors = EncodingErrors.strict,
    on_bad_row: OnBadRow = OnBadRow.refuse,
    num_workers: int = 0,
    packing: bool = False,
) -> DataSplits:
    """The user's own preferences: rows of files with `prompt`, `chosen` and `rejected`.

    Each is a text or a list of messages. Without a prompt, the messages with which both answers begin are it.

    Args:
        seed: unused: the split depends on the rows' order only.
        path: file, folder or glob, or several.
        seq_len: most tokens of the prompt with one of the answers.
        vocab_size: entries of the tokenizer.
        tokenizer: tokenizer.json or folder to use; None: train one on the training split.
        held_out: share of rows for validation.
        cache_dir: folder for tokenizers and token arrays.
        validation_path: files for validation; None: hold out a share of `path`.
        weights: shares in which several paths are read; None: each row once an epoch.
        chat_template: as `resolve_chat_template` takes it.
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
        PREFERENCES,
        seq_len=seq_len,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        chat_template=chat_template,
        on_bad_row=on_bad_row,
    )


def _pair_segments(template: ChatTemplate, row: Row) -> list[list[Segment]]:
    """The two examples of a row, the chosen one first; what the assistant says after the prompt is learnt.

    Raises:
        BadRowError: an answer is missing or empty, both are the same, there is no prompt, or the template does not take
            the messages or renders two prompts.
    """
    check_template_columns(template, row.columns)
    prompt, *answers = _read_pair(row.columns)
    if answers[0] == answers[1]:
        raise BadRowError("chosen equals rejected", "has the same answer as chosen and as rejected")
    examples = list[list[Segment]]()
    for kind, answer in zip(_KINDS, answers, strict=True):
        if not answer or answer[0]["role"] != "assistant":
            raise BadRowError("no assistant turn", f"has no assistant turn in {kind} right after the prompt")
        num_answers = sum(message["role"] == "assistant" for message in answer)
        try:
            examples.append(trained_segments(template, [*prompt, *answer], num_answers))
        except BadRowError as error:
            raise BadRowError(
                error.kind, f"{error} as {kind}" if error.kind == "empty answer" else str(error)
            ) from None
    if examples[0][0] != examples[1][0]:
        message = "has a prompt that the chat template renders differently for chosen and for rejected"
        raise BadRowError("does not fit the chat template", message)
    return examples


def _read_pair(columns: Mapping[str, Any]) -> tuple[Conversation, Conversation, Conversation]:
    """The messages of the prompt, and those that follow it in the chosen and in the rejected answer.

    Raises:
        BadRowError: there are none, or something is of another type.
    """
    missing = [name for name in _KINDS if columns.get(name) is None]
    if missing:
        listed = ", ".join(sorted(name for name, value in columns.items() if value is not None)) or "none"
        raise BadRowError("without a pair", f"has no {' and no '.join(missing)} (its columns: {listed})")
    chosen, rejected = (as_messages(columns[name], name, "assistant") for name in _KINDS)
    if columns.get("prompt") is not None:
        prompt = as_messages(columns["prompt"], "prompt", "user")
        if _starts_with(chosen, prompt) and _starts_with(rejected, prompt):
            return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
        return prompt, chosen, rejected
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if shared == len(chosen) == len(rejected):
        shared -= 1  # the same answer twice, which is what is wrong with it
    if not shared:
        raise BadRowError(
            "without a prompt", "has no prompt, and chosen and rejected do not begin with the same messages"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _starts_with(messages: Sequence[Mapping[str, Any]], prompt: Sequence[Mapping[str, Any]]) -> bool:
    return len(prompt) > 0 and list(messages[: len(prompt)]) == list(prompt)


PREFERENCES = RowForm(segments=_pair_segments, described="preferences", are_pairs=True)
"""Two examples of a row's `prompt`, `chosen` and `rejected`."""
