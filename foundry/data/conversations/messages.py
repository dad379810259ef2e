"""Reading and validation of a row's messages, and their conversion to segments with a chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from foundry.core.errors import as_text
from foundry.data.conversations.chat import ChatTemplate, Segment
from foundry.data.conversations.examples import BadRowError

FOR_TEMPLATE = ("tools", "chat_template_kwargs", "documents")
"""Columns that transformers passes to a chat template along with the messages; not supported here."""
_WEIGHTS = ("weight", "train", "training", "train_detail")
"""Message keys that other programs use for the loss weight or loss mask of an answer; not supported here."""


def check_template_columns(template: ChatTemplate, columns: Mapping[str, Any]) -> None:
    """Reject a row with tools or other variables for the chat template.

    Raises:
        BadRowError: a column of `FOR_TEMPLATE` has a value; for `documents`, only if the template uses that name.
    """
    for name in FOR_TEMPLATE:
        value = columns.get(name)
        is_empty = not value or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))
        # Many datasets have a `documents` column that is not meant for the template.
        if not is_empty and (name != "documents" or name in template.source):
            message = (
                f"has {name}, but the chat template receives only messages; move this column into a message of the row"
            )
            raise BadRowError(f"with {name}", message)


def trained_segments(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], num_trained: int | None
) -> list[Segment]:
    """Render a conversation to segments.

    Args:
        template: the chat template.
        messages: messages with `role` and `content`.
        num_trained: number of answers to train on, counted from the last; None for all.

    Raises:
        BadRowError: there is no answer, a trained answer is empty or has a weight other than 1, or the conversation
            does not fit the template.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages)) or "none"
        raise BadRowError("no assistant turn", f"has no assistant turn (its roles: {roles})")
    for answer in answers[-(num_trained or 0) :]:
        if not answer["content"].strip():
            raise BadRowError("empty answer", "has an empty answer")
        if weighted := [name for name in _WEIGHTS if name in answer and answer[name] != 1]:
            message = (
                f"has {weighted[0]}={as_text(answer[weighted[0]])} in an answer, but all answers have equal weight; "
            )
            message += "end the conversation before it, or set data.train_on=last to train on the last answer only"
            raise BadRowError(f"with {weighted[0]} in an answer", message)
    try:
        return template.segments(messages, num_trained=num_trained)
    except ValueError as error:
        raise BadRowError("does not fit the chat template", str(error)) from None


def read_messages(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row, from `messages`, or from `prompt` (user) and `completion` (assistant).

    Raises:
        BadRowError: a column is missing, or a value has the wrong type.
    """
    if columns.get("messages") is not None:
        return check_messages(columns["messages"], "messages")
    missing = [name for name in ("prompt", "completion") if columns.get(name) is None]
    if missing:
        names = ", ".join(sorted(name for name, value in columns.items() if value is not None)) or "none"
        message = f"has neither messages nor {' and '.join(missing)} (its columns: {names})"
        raise BadRowError("without a conversation", message)
    prompt, completion = columns["prompt"], columns["completion"]
    return [*as_messages(prompt, "prompt", "user"), *as_messages(completion, "completion", "assistant")]


def as_messages(value: Any, name: str, role: str) -> list[dict[str, Any]]:
    """Return messages from a text, which becomes one message, or from a list of messages, which is validated.

    Args:
        value: a text or a list of messages.
        name: column of the value, for error messages.
        role: role of the message made from a text.

    Raises:
        BadRowError: the value is not a valid text or a valid list of messages.
    """
    if isinstance(value, str):
        return check_messages([{"role": role, "content": value}], name)
    return check_messages(value, name)


def check_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Validate a list of messages with string values `role` and `content`, and drop keys that are null.

    Raises:
        BadRowError: the value is not a list of messages.
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
                raise BadRowError("wrong type", f"has {kind} {key} in message {number}, not text")
            try:
                text.encode()
            except UnicodeEncodeError:
                what = f"has an unpaired surrogate in message {number}, which is not valid Unicode"
                raise BadRowError("wrong type", what) from None
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages
