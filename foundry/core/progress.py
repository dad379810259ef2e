"""Counters of a run's progress.

Learning rate, weight decay and batch size follow the samples consumed; a schedule length in tokens is converted with
the data's tokens per sample. Intervals in tokens, tokens per second and FLOPs follow the tokens consumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry.core.state_values import read_count, read_optional_count


@dataclass(kw_only=True)
class Progress:
    """Progress of a run, counted in whole optimizer steps.

    Attributes:
        samples_per_epoch: samples in one pass over the training data.
        tokens_per_sample: used to count tokens if a checkpoint does not contain them; None if samples are not sequences
            of tokens.
        steps: optimizer steps taken.
        samples: samples consumed, over all ranks.
        tokens: tokens consumed, over all ranks, as counted by the data; None if it does not count tokens.
    """

    samples_per_epoch: int
    tokens_per_sample: int | None
    steps: int = 0
    samples: int = 0
    tokens: int | None = None

    @property
    def epoch(self) -> float:
        """Number of passes over the training data, as a fraction."""
        return self.samples / self.samples_per_epoch

    def advance(self, samples: int, tokens: int | None) -> None:
        """Count one optimizer step that consumed `samples` samples with `tokens` tokens."""
        self.steps += 1
        self.samples += samples
        self.tokens = None if tokens is None else (self.tokens or 0) + tokens

    def state_dict(self) -> dict[str, int | None]:
        """Return steps, samples and tokens as plain JSON."""
        return {"steps": self.steps, "samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`; if it has no key `tokens`, the tokens are computed from `tokens_per_sample`."""
        self.steps, self.samples = read_count(state, "steps"), read_count(state, "samples")
        constant = None if self.tokens_per_sample is None else self.samples * self.tokens_per_sample
        self.tokens = read_optional_count({"tokens": constant, **state}, "tokens")
