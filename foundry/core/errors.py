"""Config errors and their texts."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

from foundry.run_dir.redact import one_line

_LONGEST_VALUE, _LONGEST_LINE = 60, 400
_BEFORE_DIFFERENCE = 8


@dataclass(frozen=True)
class Violation:
    """One config error: the key, and a message with the problem of its value and the remedy.

    Its string is one line without secrets and terminal control characters.
    """

    key: str
    message: str

    def __str__(self) -> str:
        return shortened(visible(f"{self.key}: {self.message}"), _LONGEST_LINE)


class ConfigError(Exception):
    """Errors in a configuration, nearly always found before training.

    A command prints one line for each violation and has exit code 2.
    """

    def __init__(self, violations: Iterable[Violation] | Violation) -> None:
        self.violations = (violations,) if isinstance(violations, Violation) else tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Violation, ...]]]:
        return type(self), (self.violations,)


def format_reason(error: BaseException) -> str:
    """Format an error in one line: type and first line of the message; for a config error, all violations."""
    if isinstance(error, ConfigError):
        return "; ".join(map(str, error.violations))
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean x?` for the closest match to a misspelt word, ignoring case; empty if no word is close."""
    spellings = dict[str, list[str]]()
    for candidate in candidates:
        spellings.setdefault(candidate.lower(), []).append(candidate)
    matches = difflib.get_close_matches(word.lower(), spellings, n=1, cutoff=0.6)
    if not matches:
        return ""
    best = max(spellings[matches[0]], key=lambda candidate: difflib.SequenceMatcher(None, word, candidate).ratio())
    return f"; did you mean {best}?"


def as_text(value: object) -> str:
    """Format a value for an error message: None as null, a float with 6 digits, a long text with its middle omitted."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:g}"
    try:
        return shortened(visible(str(value)), _LONGEST_VALUE)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number with thousands of digits"


def contrast(old: object, new: object, formatter: Callable[[object], str] = as_text) -> tuple[str, str]:
    """Return two different values as short texts that differ.

    Args:
        old: the old value.
        new: the new value.
        formatter: formats a value. If both texts are equal, the values are written in full, and cut to the passage
            around their first difference.
    """
    texts = formatter(old), formatter(new)
    if texts[0] != texts[1]:
        return texts
    are_texts = isinstance(old, str) and isinstance(new, str)
    for format_full in (str, repr) if are_texts else (repr,):  # str first; it shows a line break as a space, repr as \n
        full_texts = [visible(format_full(value)) for value in (old, new)]
        if full_texts[0] != full_texts[1]:
            break
    else:  # a secret, the only difference, is masked in both texts
        return texts
    prefix_length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*full_texts, strict=False)))
    begin = max(0, prefix_length - _BEFORE_DIFFERENCE)
    first, second = (f"{'…' if begin else ''}{text[begin : begin + _LONGEST_VALUE]}" for text in full_texts)
    return first, second


def listed(items: Sequence[object], max_items: int) -> str:
    """Return the first `max_items` items and the number of the remaining ones, as in `a, b and 3 more`."""
    remainder = f" and {len(items) - max_items} more" if len(items) > max_items else ""
    return ", ".join(map(str, items[:max_items])) + remainder


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in `1 job` and `2 jobs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(message: str) -> str:
    """Return a library's error message in one line: its first line, and the second if the first ends with a colon."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines[0] if lines else "unknown error")


def visible(text: str) -> str:
    """Return text in one line without secrets, with unprintable characters as escape codes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in one_line(text))


def shortened(text: str, max_length: int) -> str:
    """Shorten a text to `max_length` characters by omitting its middle."""
    if len(text) <= max_length:
        return text
    end = max_length // 3
    begin = max_length - end - len(f" … {len(text):,} more characters … ")
    return f"{text[:begin]} … {len(text) - begin - end:,} more characters … {text[-end:]}"
