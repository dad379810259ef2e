"""The clock of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry.core.state_values import read_count, read_optional_count


@dataclass(kw_only=True)
class Progress:
    """How far a run has come; it advances only after an optimizer step.

    Attributes:
        samples_per_epoch: samples in one pass over the training data.
        tokens_per_sample: of a run whose checkpoint does not say its tokens; None: samples are no sequences of tokens.
        steps: optimizer steps taken.
        samples: samples consumed, over all ranks.
        tokens: likewise, as the source of the samples counts them; None where it counts none.
    """

    samples_per_epoch: int
    tokens_per_sample: int | None
    steps: int = 0
    samples: int = 0
    tokens: int | None = None

    @property
    def epoch(self) -> float:
        """Passes over the training data, with their fraction."""
        return self.samples / self.samples_per_epoch

    def advance(self, samples: int, tokens: int | None) -> None:
        """Count one optimizer step that consumed `samples` samples with `tokens` tokens."""
        self.steps += 1
        self.samples += samples
        self.tokens = None if tokens is None else (self.tokens or 0) + tokens

    def state_dict(self) -> dict[str, int | None]:
        """Steps, samples and tokens; plain JSON."""
        return {"steps": self.steps, "samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; one without tokens is of a run whose samples all have the same number."""
        self.steps, self.samples = read_count(state, "steps"), read_count(state, "samples")
        constant = None if self.tokens_per_sample is None else self.samples * self.tokens_per_sample
        self.tokens = read_optional_count({"tokens": constant, **state}, "tokens")
