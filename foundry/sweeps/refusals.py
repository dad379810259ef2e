"""Summary of the config errors of a sweep: each error once, with the affected jobs."""

import re
from collections.abc import Iterable, Iterator, Sequence

from foundry.core.errors import ConfigError, Violation
from foundry.sweeps.job import Job

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_ALIKE_IN_FULL = 3
"""If more messages than this differ only in the jobs' own values, only the first of them is printed."""
_NUMBERS_SHOWN = 3

Found = tuple[int, Job, Violation]
"""Number of a job, the job, and one of its violations."""


def refusals(jobs: Sequence[Job], results: Sequence[object]) -> list[Violation]:
    """Return one violation for each distinct error, with the affected jobs in its message.

    Args:
        jobs: the jobs of a sweep.
        results: the composed configuration of each job, or its ConfigError.
    """
    equal: dict[Violation, list[Found]] = {}
    for number, (job, result) in enumerate(zip(jobs, results, strict=True)):
        for violation in dict.fromkeys(result.violations) if isinstance(result, ConfigError) else ():
            equal.setdefault(violation, []).append((number, job, violation))
    alike: dict[tuple[str, str], list[list[Found]]] = {}
    for violation, found in equal.items():
        alike.setdefault((violation.key, _shape(violation.message, found[0][1])), []).append(found)
    return [violation for _, violation in sorted(_lines(alike.values(), len(jobs)), key=lambda line: line[0])]


def _lines(alike: Iterable[list[list[Found]]], total: int) -> Iterator[tuple[int, Violation]]:
    """Yield the violations, each with the number of its first affected job."""
    for groups in alike:
        if len(groups) <= _ALIKE_IN_FULL:
            yield from ((found[0][0], _line(found, total, "")) for found in groups)
        else:
            together = sorted((each for found in groups for each in found), key=lambda each: each[0])
            yield together[0][0], _line(together, total, ", with different values")


def _line(found: list[Found], total: int, how: str) -> Violation:
    number, job, violation = found[0]
    if len(found) == 1:
        return Violation(f"job {number} ({job.settings})" if job.swept else f"job {number}", str(violation))
    if len(found) == total and not how:
        return Violation(violation.key, f"{violation.message} (all {total} jobs)")
    numbers = ", ".join(str(number) for number, _, _ in found[:_NUMBERS_SHOWN])
    more = ", …" if len(found) > _NUMBERS_SHOWN else ""
    jobs = f"{len(found)} of {total} jobs{how}: {numbers}{more}; the first, job {number}: {job.settings}"
    return Violation(violation.key, f"{violation.message} ({jobs})")


def _shape(message: str, job: Job) -> str:
    """Return a message with placeholders in place of numbers and the job's swept values."""
    shape = _NUMBER.sub("#", message)
    for override in job.swept:
        value = _NUMBER.sub("#", override.partition("=")[2])
        if value not in ("", "#"):
            shape = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "#", shape)
    return shape
