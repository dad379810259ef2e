"""Tokenization of a robot's instructions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from foundry.core.errors import ConfigError, Violation, as_text
from foundry.data.conversations.chat import find_template
from foundry.data.corpora.tokenizer import load_tokenizer, tokenizer_file, train_tokenizer
from foundry.data.splits import DataSplits

_KEY = "data.instruction_tokens"


class InstructionTokenizer(NamedTuple):
    """Tokenization of instructions; see `DataSplits`.

    Attributes:
        tokenizer: tokenizer of the instructions.
        stop_ids: tokens that end a document.
        chat_template: chat template of the weights that the tokenizer belongs to; None if instructions are plain text.
    """

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None


def read_tokenizer(texts: Sequence[str], tokenizer: str | None, vocab_size: int) -> InstructionTokenizer:
    """Return the given tokenizer with its chat template, or a byte-level BPE trained on the instructions.

    Args:
        texts: distinct instructions of the training episodes, in an order that does not depend on the episodes' order.
        tokenizer: tokenizer.json or its folder; None to train one.
        vocab_size: maximum number of entries.

    Raises:
        ConfigError: as in `load_tokenizer`, or if all texts are empty.
    """
    if not any(texts):
        message = "is set but no training episode has an instruction; leave it out"
        raise ConfigError(Violation(_KEY, message))
    if tokenizer is None:
        return InstructionTokenizer(train_tokenizer(texts, vocab_size))
    loaded, end = load_tokenizer(tokenizer, vocab_size)
    return InstructionTokenizer(loaded, (end,), find_template(tokenizer_file(tokenizer).parent))


def encode_instructions(texts: Sequence[str], data: DataSplits, instruction_tokens: int) -> NDArray[np.int64]:
    """Return the tokens of instructions, (len(texts), instruction_tokens) int64, with -1 after the end of each.

    If the data has a chat template, an instruction is encoded as a user turn, up to the start of the assistant's
    answer. At this point a chat model has understood the request, which is the information that an action needs.

    Args:
        texts: the instructions.
        data: the data, with the tokenizer.
        instruction_tokens: maximum number of tokens of an instruction.

    Raises:
        ConfigError: if an instruction is too long, or the template rejects it.
    """
    encoded = np.full((len(texts), instruction_tokens), -1, dtype=np.int64)
    for row, text in zip(encoded, texts, strict=True):
        try:
            ids = data.encode_prompt(text) if text else []
        except ValueError as error:
            raise ConfigError(Violation("data.tokenizer", f"has a chat template in its folder that {error}")) from None
        if len(ids) > instruction_tokens:
            message = (
                f"is {instruction_tokens} but {as_text(text)} has {len(ids)} tokens; set it to at least {len(ids)}"
            )
            raise ConfigError(Violation(_KEY, message))
        row[: len(ids)] = ids
    return encoded
