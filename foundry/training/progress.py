"""The clock of a run."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(kw_only=True)
class Progress:
    """How far a run has come; it advances only after an optimizer step.

    Attributes:
        samples_per_epoch: samples in one pass over the training data.
        tokens_per_sample: None where samples are not sequences of tokens.
        steps: optimizer steps taken.
        samples: samples consumed, over all ranks.
    """

    samples_per_epoch: int
    tokens_per_sample: int | None
    steps: int = 0
    samples: int = 0

    @property
    def tokens(self) -> int | None:
        """Tokens consumed."""
        return None if self.tokens_per_sample is None else self.samples * self.tokens_per_sample

    @property
    def epoch(self) -> float:
        """Passes over the training data, with their fraction."""
        return self.samples / self.samples_per_epoch

    def advance(self, samples: int) -> None:
        """Count one optimizer step that consumed `samples` samples."""
        self.steps += 1
        self.samples += samples

    def state_dict(self) -> dict[str, int]:
        """Steps and samples; plain JSON."""
        return {"steps": self.steps, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state_dict()`."""
        self.steps, self.samples = state["steps"], state["samples"]
