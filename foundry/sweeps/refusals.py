"""Summary of the config errors of a sweep: each error once, with the affected jobs."""

import re
from collections.abc import Iterable, Iterator, Sequence

from foundry.core.errors import ConfigError, Violation
from foundry.sweeps.job import Job

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_ALIKE_IN_FULL = 3
"""If more messages than this differ only in numbers and in the jobs' own values, only the first is printed."""
_NUMBERS_SHOWN = 3

Occurrence = tuple[int, Job, Violation]
"""Number of a job, the job, and one of its violations."""


def refusals(jobs: Sequence[Job], results: Sequence[object]) -> list[Violation]:
    """Return one violation for each distinct error, with the affected jobs in its message.

    Args:
        jobs: the jobs of a sweep.
        results: the composed configuration of each job, or its ConfigError.
    """
    occurrences_of: dict[Violation, list[Occurrence]] = {}
    for number, (job, result) in enumerate(zip(jobs, results, strict=True)):
        for violation in dict.fromkeys(result.violations) if isinstance(result, ConfigError) else ():
            occurrences_of.setdefault(violation, []).append((number, job, violation))
    groups: dict[tuple[str, str], list[list[Occurrence]]] = {}
    for violation, cases in occurrences_of.items():
        groups.setdefault((violation.key, _shape(violation.message, cases[0][1])), []).append(cases)
    return [violation for _, violation in sorted(_lines(groups.values(), len(jobs)), key=lambda line: line[0])]


def _lines(groups: Iterable[list[list[Occurrence]]], total: int) -> Iterator[tuple[int, Violation]]:
    """Yield the violations, each with the number of the first job that it affects."""
    for group in groups:
        if len(group) <= _ALIKE_IN_FULL:
            yield from ((cases[0][0], _line(cases, total, "")) for cases in group)
        else:
            merged = sorted((case for cases in group for case in cases), key=lambda case: case[0])
            yield merged[0][0], _line(merged, total, ", with different values")


def _line(cases: list[Occurrence], total: int, suffix: str) -> Violation:
    number, job, violation = cases[0]
    if len(cases) == 1:
        return Violation(f"job {number} ({job.settings})" if job.swept else f"job {number}", str(violation))
    if len(cases) == total and not suffix:
        return Violation(violation.key, f"{violation.message} (all {total} jobs)")
    numbers = ", ".join(str(number) for number, _, _ in cases[:_NUMBERS_SHOWN])
    ellipsis = ", …" if len(cases) > _NUMBERS_SHOWN else ""
    jobs = f"{len(cases)} of {total} jobs{suffix}: {numbers}{ellipsis}; the first, job {number}: {job.settings}"
    return Violation(violation.key, f"{violation.message} ({jobs})")


def _shape(message: str, job: Job) -> str:
    """Return a message with placeholders in place of numbers and the job's swept values."""
    shape = _NUMBER.sub("#", message)
    for override in job.swept:
        value = _NUMBER.sub("#", override.partition("=")[2])
        if value not in ("", "#"):
            shape = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "#", shape)
    return shape
