"""Sums worked out digit by digit: a task for each way of training, in seconds, with answers that are right or wrong."""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from foundry.config.schemas.data import ArithmeticForm, OnBadRow, TrainOn
from foundry.data.chats import RowSource, chat_splits
from foundry.data.corpus import Corpus, Splits
from foundry.data.rows import Row, RowSplits
from foundry.data.splits import DataSplits
from foundry.data.text import text_splits

_FORMAT = 1
_VALIDATION_ROWS = 512
_THREE_DIGITS, _TWO_TURNS = 0.4, 0.15
"""Shares of sums with three digits, and of conversations with two questions."""


class Sum(NamedTuple):
    """Two numbers to be added, of two or of three digits each."""

    a: int
    b: int

    @property
    def question(self) -> str:
        """As a user asks it."""
        return f"What is {self.a}+{self.b}?"

    def worked(self) -> str:
        """The sum from the last digit to the first, each with the carry of the one before, and the answer."""
        steps, carry = list[str](), 0
        for first, second in zip(reversed(str(self.a)), reversed(str(self.b)), strict=True):
            total = int(first) + int(second) + carry
            steps.append(f"{first}+{second}{'+1' if carry else ''}={total}")
            carry = total // 10
        return f"{', '.join(steps)}. Answer: {self.a + self.b}"

    def is_held_out(self, share: float) -> bool:
        """Whether it is for validation: by a hash of the two numbers in either order, whatever the seed."""
        key = f"{min(self)}+{max(self)}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < share * 2**64


def arithmetic(
    *,
    seed: int,
    form: ArithmeticForm,
    num_rows: int,
    seq_len: int,
    vocab_size: int,
    tokenizer: str | None,
    held_out: float,
    cache_dir: str,
    chat_template: str | None = None,
    train_on: TrainOn = TrainOn.all,
    num_workers: int = 0,
) -> DataSplits:
    """Worked sums as text or as conversations; the same sums are held out in every form, and with every seed.

    Args:
        seed: of the sums to learn from.
        form: what a sample is.
        num_rows: to learn from: lines of text, or conversations.
        seq_len: tokens of a sequence of text, or most of a conversation.
        vocab_size: entries of the tokenizer; 257 are the bytes and the end of a document, so that digits do not merge.
        tokenizer: tokenizer.json or folder to use; None: train one.
        held_out: share of all sums that are for validation.
        cache_dir: folder for tokenizers and token arrays.
        chat_template: of conversations, as `resolve_chat_template` takes it.
        train_on: which answers of a conversation are learnt.
        num_workers: unused: the loader's.

    Raises:
        ConfigError: the tokenizer or template does not fit, or there are not enough rows or tokens for a sample.
    """
    settings = f"arithmetic {_FORMAT} {form.value} {seed} {num_rows} {held_out}"
    fingerprint = hashlib.sha256(settings.encode()).hexdigest()
    train = _Rows(seed, num_rows, held_out, is_held=False)
    validation = _Rows(0, _VALIDATION_ROWS, held_out, is_held=True)
    if form is ArithmeticForm.text:
        corpus = Corpus(fingerprint, fingerprint, lambda: Splits(_Made(train, _text), _Made(validation, _text)))
        return text_splits(corpus, seq_len=seq_len, vocab_size=vocab_size, tokenizer=tokenizer, cache_dir=cache_dir)
    source = RowSource(
        splits=RowSplits(_Made(train, _conversation), _Made(validation, _conversation)),
        places=["row"],
        fingerprint=fingerprint,
        content=fingerprint,
        key="data.seq_len",
        remedy="give more",
    )
    return chat_splits(
        source,
        seq_len=seq_len,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        chat_template=chat_template,
        train_on=train_on,
        on_bad_row=OnBadRow.refuse,
    )


@dataclass(frozen=True)
class _Rows:
    """Draws sums for each row; row n is the same whatever the number of rows."""

    seed: int
    count: int
    held_out: float
    is_held: bool

    def __iter__(self) -> Iterator[list[Sum]]:
        for number in range(self.count):
            generator = random.Random(f"{self.seed} {number} {self.is_held}")
            turns = 2 if generator.random() < _TWO_TURNS else 1
            yield [self._draw(generator) for _ in range(turns)]

    def _draw(self, generator: random.Random) -> Sum:
        while True:
            low = 100 if generator.random() < _THREE_DIGITS else 10
            found = Sum(generator.randrange(low, 10 * low), generator.randrange(low, 10 * low))
            if found.is_held_out(self.held_out) == self.is_held:
                return found


@dataclass(frozen=True)
class _Made:
    """What is made of each row's sums, given the row's number; it can be iterated again and again."""

    rows: _Rows
    make: Callable[[int, list[Sum]], Any]

    def __iter__(self) -> Iterator[Any]:
        return (self.make(number, sums) for number, sums in enumerate(self.rows, 1))


def _text(number: int, sums: list[Sum]) -> str:
    return "\n".join(f"{one.a}+{one.b}: {one.worked()}" for one in sums)


def _conversation(number: int, sums: list[Sum]) -> Row:
    messages = list[dict[str, str]]()
    for one in sums:
        messages.append({"role": "user", "content": one.question})
        messages.append({"role": "assistant", "content": one.worked()})
    return Row(0, number, {"messages": messages})
