"""Reading of text sample files."""

import re


def read_samples(file):
    """Return the texts in a sample file, each a prompt with its continuation."""
    _, *blocks = re.split(r"\n\n=== sample \d+ of \d+ =+\n", file.read_text().removesuffix("\n"))
    parts = [re.split(r"^--- (?:prompt|continuation) -+\n", block, flags=re.MULTILINE)[1:] for block in blocks]
    return ["".join([*(prompt.removesuffix("\n") for prompt in prompts), text]) for *prompts, text in parts]
