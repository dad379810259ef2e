"""`foundry eval` within the test process, with options as Python values."""

from foundry.commands.eval import evaluate as evaluate_words
from foundry.config.command import quoted


def evaluate(overrides=(), /, **options):
    """Run `foundry eval` with options and overrides, and return the measurements."""
    return evaluate_words([*(f"{name}={_written(value)}" for name, value in options.items()), *overrides])


def _written(value):
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quoted(value) if isinstance(value, str) else str(value)
