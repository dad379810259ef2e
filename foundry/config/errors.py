"""What foundry says when a configuration cannot be run."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from foundry.records.redact import one_line


@dataclass(frozen=True)
class Violation:
    """One mistake in a configuration: the key, and what is wrong with its value and how to mend it.

    As text it is one line without secrets and without what a terminal would obey.
    """

    key: str
    message: str

    def __str__(self) -> str:
        return one_line(f"{self.key}: {self.message}")


class ConfigError(Exception):
    """A user's mistake, found before anything was spent. Printed as one line per violation; exit code 2."""

    def __init__(self, violations: Iterable[Violation] | Violation) -> None:
        self.violations = (violations,) if isinstance(violations, Violation) else tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))


def nearest(word: str, among: Iterable[str]) -> str:
    """`; did you mean x?` for the one nearest to a misspelt word, or nothing."""
    near = difflib.get_close_matches(word, list(among), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
