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
    """An error in a configuration, found before training.

    Printed with one line for each violation; exit code 2.
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


def nearest(word: str, among: Iterable[str]) -> str:
    """Return `; did you mean x?` for the closest match to a misspelt word, ignoring case; empty if no word is close."""
    words = dict[str, list[str]]()
    for other in among:
        words.setdefault(other.lower(), []).append(other)
    near = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    if not near:
        return ""
    likest = max(words[near[0]], key=lambda other: difflib.SequenceMatcher(None, word, other).ratio())
    return f"; did you mean {likest}?"


def shown(value: object) -> str:
    """Format a value for an error message: short floats, plain text, and long values with the middle omitted."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:g}"
    try:
        return shortened(visible(str(value)), _LONGEST_VALUE)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number with thousands of digits"


def contrast(was: object, now: object, show: Callable[[object], str] = shown) -> tuple[str, str]:
    """Return two different values as short texts that differ.

    Args:
        was: one value.
        now: the other value.
        show: formats a value. If both texts are equal, the values are written in full, and cut to the passage around
            their first difference.
    """
    texts = show(was), show(now)
    if texts[0] != texts[1]:
        return texts
    are_texts = isinstance(was, str) and isinstance(now, str)
    for write in (str, repr) if are_texts else (repr,):  # str first; it shows a line break as a space, repr as \n
        whole = [visible(write(value)) for value in (was, now)]
        if whole[0] != whole[1]:
            break
    else:  # a secret is masked in both
        return texts
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False)))
    begin = max(0, same - _BEFORE_DIFFERENCE)
    one, other = (f"{'…' if begin else ''}{text[begin : begin + _LONGEST_VALUE]}" for text in whole)
    return one, other


def listed(items: Sequence[object], most: int) -> str:
    """List the first `most` items by name, as in `a, b and 3 more`."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


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


def shortened(text: str, most: int) -> str:
    """Shorten a text to `most` characters by omitting its middle."""
    if len(text) <= most:
        return text
    end = most // 3
    begin = most - end - len(f" … {len(text):,} more characters … ")
    return f"{text[:begin]} … {len(text) - begin - end:,} more characters … {text[-end:]}"
