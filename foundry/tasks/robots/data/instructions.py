"""What a robot is to do, in words, as tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from foundry.core.errors import ConfigError, Violation, shown
from foundry.data.conversations.chat import template_beside
from foundry.data.corpora.tokenizer import load_tokenizer, tokenizer_file, train_tokenizer
from foundry.data.splits import DataSplits

_KEY = "data.instruction_tokens"


class Words(NamedTuple):
    """How instructions become tokens; see `DataSplits`.

    Attributes:
        tokenizer: of instructions.
        stop_ids: tokens that end a document.
        chat_template: of the weights that the tokenizer belongs to; None: instructions are plain text.
    """

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None


def read_words(texts: Sequence[str], tokenizer: str | None, vocab_size: int) -> Words:
    """A tokenizer that is given, with the chat template beside it, or byte-level BPE trained on what is to be learnt.

    Args:
        texts: instructions of the training episodes, each once, in an order that does not depend on the episodes'.
        tokenizer: tokenizer.json or folder; None: train one.
        vocab_size: most entries.

    Raises:
        ConfigError: see `load_tokenizer`; or there is nothing to train one on.
    """
    if not any(texts):
        message = "is given but no episode to learn from has an instruction; leave it out"
        raise ConfigError(Violation(_KEY, message))
    if tokenizer is None:
        return Words(train_tokenizer(texts, vocab_size))
    loaded, end = load_tokenizer(tokenizer, vocab_size)
    return Words(loaded, (end,), template_beside(tokenizer_file(tokenizer).parent))


def encode_instructions(texts: Sequence[str], data: DataSplits, instruction_tokens: int) -> NDArray[np.int64]:
    """Tokens of instructions, (len(texts), instruction_tokens) int64, -1 after the end of each.

    Where the data has a chat template an instruction is what the user says, up to where an answer would begin: what a
    model of conversations has made out by then is what an action needs.

    Args:
        texts: the instructions.
        data: has the tokenizer.
        instruction_tokens: the most that one may have.

    Raises:
        ConfigError: one has more, or the template refuses it.
    """
    encoded = np.full((len(texts), instruction_tokens), -1, dtype=np.int64)
    for row, text in zip(encoded, texts, strict=True):
        try:
            ids = data.encode_prompt(text) if text else []
        except ValueError as error:
            raise ConfigError(Violation("data.tokenizer", f"has a chat template beside it that {error}")) from None
        if len(ids) > instruction_tokens:
            message = f"is {instruction_tokens} but {shown(text)} has {len(ids)} tokens; set it to at least {len(ids)}"
            raise ConfigError(Violation(_KEY, message))
        row[: len(ids)] = ids
    return encoded
