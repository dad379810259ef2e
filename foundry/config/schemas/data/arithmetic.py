"""Settings of the synthetic arithmetic dataset."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from foundry.config.schemas.data.base import Tokenised
from foundry.config.schemas.data.rows import (
    LONGEST_ANSWER,
    Conversations,
    TrainOn,
    check_room,
)
from foundry.config.schemas.data.text import Text
from foundry.config.setting import setting
from foundry.core.errors import Violation
from foundry.core.tasks import installed_tasks


class ArithmeticForm(Enum):
    """Kind of sample in `data=arithmetic`."""

    text = "text"
    chats = "chats"
    preferences = "preferences"
    prompts = "prompts"


_OFFERS = {ArithmeticForm.preferences: "pairs", ArithmeticForm.prompts: "prompts"}
"""Contents of a sample in the forms that installed tasks build, in addition to tokens."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Conversations):
    """Sums of two- and three-digit numbers, worked out digit by digit; all forms hold out the same sums."""

    _target_: str = "foundry.datasets.arithmetic"
    form: ArithmeticForm = setting(
        ArithmeticForm.chats,
        "text: sequences for objective=next_token; chats: conversations for objective=sft; preferences: correct "
        "answers and answers with a wrong carry, for objective=dpo; prompts: questions for objective=grpo, and for "
        "objective=distillation with mode=on_policy",
    )
    num_rows: int = setting(20_000, "number of training rows: lines of text or conversations", ge=2, le=10**8)
    seq_len: int = setting(
        160, "tokens per training sequence of text, or maximum tokens of a conversation", ge=1, le=10**8
    )
    vocab_size: int = setting(
        257,
        "vocabulary size of the tokenizer; 257: one token for each byte and for the end of a document, so that "
        "digits are not merged",
        ge=1,
        le=10**8,
    )
    max_new_tokens: int = setting(
        LONGEST_ANSWER,
        "tokens of seq_len reserved for the completion; default: objective.max_new_tokens",
        ge=0,
        alone=0,
    )

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override] # a property, because the value depends on `form`
        """Contents of a sample, which determine the objectives that can train on the data."""
        by_form: dict[ArithmeticForm, type[Tokenised]] = {
            ArithmeticForm.text: Text,
            ArithmeticForm.chats: Conversations,
        }
        known = by_form.get(self.form)
        return frozenset({"tokens", _OFFERS[self.form]}) if known is None else known.offers

    @property
    def is_ragged(self) -> bool:  # type: ignore[override]
        """True if samples have different lengths."""
        return self.form is not ArithmeticForm.text

    def check(self) -> Iterator[Violation]:
        """Check that a task trains on `form`, `train_on` has an effect, and prompts leave room for a completion."""
        yield from super().check()
        if self.form in _OFFERS and not any(self.form.value in task.forms for task in installed_tasks()):
            message = f"is {self.form.value} but no installed task trains on this form; choose text or chats"
            yield Violation("data.form", message)
        if self.train_on is not TrainOn.all and self.form is not ArithmeticForm.chats:
            yield Violation("data.train_on", f"is {self.train_on.value} but has no effect without data.form=chats")
        if self.form is ArithmeticForm.prompts:
            yield from check_room(self.seq_len, self.max_new_tokens)
