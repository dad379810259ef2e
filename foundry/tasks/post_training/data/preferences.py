"""Preference dataset: pairs of a chosen and a rejected answer to the same prompt."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from foundry.config.configured import configured_by
from foundry.config.schemas.data import Arithmetic
from foundry.data.conversations.chat import ChatTemplate, Segment
from foundry.data.conversations.chats import RowForm, chat_splits
from foundry.data.conversations.examples import BadRowError
from foundry.data.conversations.messages import as_messages, check_template_columns, trained_segments
from foundry.data.io.row_source import RowSource, find_rows
from foundry.data.io.rows import Row
from foundry.data.splits import DataSplits
from foundry.tasks.post_training.schemas.data import PreferenceFiles as PreferenceFilesSettings

_KINDS = ("chosen", "rejected")

Conversation = list[dict[str, Any]]


@configured_by(PreferenceFilesSettings)
def preference_files(settings: PreferenceFilesSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of preference pairs from files whose rows have `prompt`, `chosen` and `rejected`.

    Each column is a text or a list of messages. If there is no `prompt`, the messages at the start that `chosen` and
    `rejected` share are the prompt. The split depends only on the order of the rows.

    Raises:
        ConfigError: there are no files, the tokenizer or chat template does not fit, a row cannot be used (unless bad
            rows are skipped), or no row can be used.
    """
    return preference_splits(find_rows(settings, settings.known_columns), settings)


def preference_splits(source: RowSource, settings: PreferenceFilesSettings | Arithmetic) -> DataSplits:
    """Tokenize rows of preferences and build their splits.

    Raises:
        ConfigError: see `preference_files`.
    """
    return chat_splits(source, _FORM, settings)


def _pair_segments(template: ChatTemplate, row: Row) -> list[list[Segment]]:
    """Return the chosen and the rejected example of a row; the loss covers the assistant's turns after the prompt.

    Raises:
        BadRowError: an answer is missing or empty, both answers are equal, there is no prompt, or the template rejects
            the messages or renders two different prompts.
    """
    check_template_columns(template, row.columns)
    prompt, *answers = _read_pair(row.columns)
    if answers[0] == answers[1]:
        raise BadRowError("chosen equals rejected", "has the same answer in chosen and rejected")
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
    """Return the messages of the prompt, of the chosen answer and of the rejected answer.

    Raises:
        BadRowError: a column is missing, or a value has the wrong type.
    """
    missing = [name for name in _KINDS if columns.get(name) is None]
    if missing:
        names = ", ".join(sorted(name for name, value in columns.items() if value is not None)) or "none"
        raise BadRowError("without a pair", f"has no {' and no '.join(missing)} (its columns: {names})")
    chosen, rejected = (as_messages(columns[name], name, "assistant") for name in _KINDS)
    if columns.get("prompt") is not None:
        prompt = as_messages(columns["prompt"], "prompt", "user")
        if _starts_with(chosen, prompt) and _starts_with(rejected, prompt):
            return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
        return prompt, chosen, rejected
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if num_shared == len(chosen) == len(rejected):
        num_shared -= 1  # both answers are equal: let the caller report that, not a missing answer
    if not num_shared:
        raise BadRowError(
            "without a prompt", "has no prompt, and chosen and rejected do not begin with the same messages"
        )
    return chosen[:num_shared], chosen[num_shared:], rejected[num_shared:]


def _starts_with(messages: Sequence[Mapping[str, Any]], prompt: Sequence[Mapping[str, Any]]) -> bool:
    return len(prompt) > 0 and list(messages[: len(prompt)]) == list(prompt)


_FORM = RowForm(segments=_pair_segments, description="preferences", are_pairs=True)
