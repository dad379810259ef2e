"""Continued text, to read."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foundry.run_dir.files import write_atomically


@dataclass(frozen=True)
class TextSamples:
    """A prompt and what the model makes of it.

    Attributes:
        prompt: where the model started.
        text: the prompt and its continuation.
    """

    prompt: str
    text: str

    def save(self, stem: Path) -> Path:
        """Write `stem`.txt and return the file."""
        file = Path(f"{stem}.txt")
        write_atomically(file, self.text + "\n")
        return file


def sample_token(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from (vocab,) logits; temperature 0: the likeliest."""
    # Each device has a random stream of its own; the host's is the same on every rank.
    logits = logits.float().cpu()
    # A temperature so small that the quotients overflow picks the likeliest, too.
    if temperature == 0 or not (scaled := logits / temperature).max().isfinite():
        return int(logits.argmax())
    probabilities = torch.softmax(scaled, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
