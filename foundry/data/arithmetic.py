"""Synthetic dataset of worked additions, with verifiable answers, for quick runs of every training method."""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from foundry.config.configured import configured_by
from foundry.config.schemas.data import Arithmetic as ArithmeticSettings
from foundry.config.schemas.data import ArithmeticForm
from foundry.core.tasks import forms
from foundry.data.conversations.chats import RowForm, chat_splits
from foundry.data.corpora.corpus import Corpus, Splits
from foundry.data.corpora.text import text_splits
from foundry.data.io.row_source import RowSource
from foundry.data.io.rows import Row, RowSplits
from foundry.data.splits import DataSplits

_FORMAT = 1
_VALIDATION_ROWS = 512
_THREE_DIGITS, _TWO_TURNS = 0.4, 0.15
"""Probability that a sum has three-digit numbers, and probability that a row has two sums."""


class Sum(NamedTuple):
    """Two numbers to add, both of two digits or both of three."""

    a: int
    b: int

    @property
    def question(self) -> str:
        """Text of the user's message."""
        return f"What is {self.a}+{self.b}?"

    def solution(self, wrong_digit: int | None = None) -> str:
        """Return the addition worked out digit by digit with carries, from the last digit to the first, and the answer.

        Args:
            wrong_digit: position of a digit, 0 for the last, whose carry is inverted; None gives the right answer.
        """
        steps, answer, carry = list[str](), "", 0
        for place, (first, second) in enumerate(zip(reversed(str(self.a)), reversed(str(self.b)), strict=True)):
            total = int(first) + int(second) + carry
            steps.append(f"{first}+{second}{'+1' if carry else ''}={total}")
            answer = f"{total % 10}{answer}"
            carry = (total < 10) if place == wrong_digit else total // 10
        return f"{', '.join(steps)}. Answer: {carry or ''}{answer}"

    def is_held_out(self, share: float) -> bool:
        """Return whether the sum is in the validation split.

        The decision hashes the two numbers without regard to their order, and does not depend on the seed.
        """
        key = f"{min(self)}+{max(self)}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < share * 2**64


@configured_by(ArithmeticSettings)
def arithmetic(settings: ArithmeticSettings, *, seed: int = 0) -> DataSplits:
    """Build training and validation splits of worked sums, as text, conversations, preferences or prompts.

    The same sums are held out for every form and every seed.

    Args:
        settings: form and number of the sums, tokenizer and sequence length.
        seed: seed of the training sums.

    Raises:
        ConfigError: the tokenizer or chat template does not fit, or there are too few rows or tokens for one sample.
    """
    form, held_out = settings.form, settings.held_out
    description = f"arithmetic {_FORMAT} {form.value} {seed} {settings.num_rows} {held_out}"
    fingerprint = hashlib.sha256(description.encode()).hexdigest()
    train = _Rows(seed, settings.num_rows, held_out, is_validation=False)
    validation = _Rows(0, _VALIDATION_ROWS, held_out, is_validation=True)
    if form is ArithmeticForm.text:
        corpus = Corpus(
            fingerprint, fingerprint, lambda: Splits(_ConvertedRows(train, _text), _ConvertedRows(validation, _text))
        )
        return text_splits(corpus, settings)
    makers = {ArithmeticForm.preferences: _preference, ArithmeticForm.prompts: _question}
    make = makers.get(form, _conversation)
    source = RowSource(
        splits=RowSplits(_ConvertedRows(train, make), _ConvertedRows(validation, make)),
        places=["row"],
        fingerprint=fingerprint,
        content=fingerprint,
        key="data.seq_len",
        remedy="increase it",
    )
    if form is ArithmeticForm.chats:
        return chat_splits(source, RowForm.conversations(settings.train_on), settings)
    data: DataSplits = forms()[form.value](source, settings)
    return data


@dataclass(frozen=True)
class _Rows:
    """Iterable over the sums of each row; row n does not depend on the number of rows.

    Attributes:
        seed: seed of the sums.
        count: number of rows.
        held_out: fraction of all sums in the validation split.
        is_validation: draw validation sums if true, training sums otherwise.
    """

    seed: int
    count: int
    held_out: float
    is_validation: bool

    def __iter__(self) -> Iterator[list[Sum]]:
        for number in range(self.count):
            generator = random.Random(f"{self.seed} {number} {self.is_validation}")
            turns = 2 if generator.random() < _TWO_TURNS else 1
            yield [self._draw(generator) for _ in range(turns)]

    def _draw(self, generator: random.Random) -> Sum:
        while True:
            low = 100 if generator.random() < _THREE_DIGITS else 10
            candidate = Sum(generator.randrange(low, 10 * low), generator.randrange(low, 10 * low))
            if candidate.is_held_out(self.held_out) == self.is_validation:
                return candidate


@dataclass(frozen=True)
class _ConvertedRows:
    """Re-iterable over the result of `make(row number, sums)` for each row; row numbers start at 1."""

    rows: _Rows
    make: Callable[[int, list[Sum]], Any]

    def __iter__(self) -> Iterator[Any]:
        return (self.make(number, sums) for number, sums in enumerate(self.rows, 1))


def _text(number: int, sums: list[Sum]) -> str:
    return "\n".join(f"{addition.a}+{addition.b}: {addition.solution()}" for addition in sums)


def _conversation(number: int, sums: list[Sum]) -> Row:
    return Row(0, number, {"messages": [message for addition in sums for message in _turns(addition)]})


def _turns(addition: Sum) -> list[dict[str, str]]:
    return [{"role": "user", "content": addition.question}, {"role": "assistant", "content": addition.solution()}]


def _preference(number: int, sums: list[Sum]) -> Row:
    """Return a row whose chosen answer is right and whose rejected answer has one carry inverted."""
    *prompt, chosen = [message for addition in sums for message in _turns(addition)]
    last = sums[-1]
    rejected = last.solution(number % (len(str(last.a)) - 1))
    return Row(0, number, {"prompt": prompt, "chosen": chosen["content"], "rejected": rejected})


def _question(number: int, sums: list[Sum]) -> Row:
    """Return a row whose prompt ends with the question of the last sum; the column `answer` has its solution."""
    *prompt, answer = [message for addition in sums for message in _turns(addition)]
    return Row(0, number, {"prompt": prompt, "answer": answer["content"]})
