"""Expansion of swept overrides to the overrides of each job."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_CEILING, Context, Decimal, localcontext

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException

from foundry.config.schemas.sweeper import Sweep
from foundry.core.errors import ConfigError, Violation, nearest
from foundry.sweeps.job import Job

_ZIP, _EXCLUDE = "hydra.sweeper.zip", "hydra.sweeper.exclude"
_OVERRIDE = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
"""Matches overrides separated by spaces, except for spaces within quotes."""


def expand(overrides: Sequence[Override], options: Sweep) -> list[Job]:
    """Return all jobs of a sweep except for excluded ones; the last swept key varies fastest.

    Args:
        overrides: the parsed overrides of the sweep; the last one for a key takes effect.
        options: the zipped keys, the excluded combinations, and the maximum number of jobs.

    Raises:
        ConfigError: with all errors in the overrides and options.
    """
    by_key = {override.get_key_element(): override for override in overrides}
    if continuous := [o for o in by_key.values() if o.is_sweep_override() and not o.is_discrete_sweep()]:
        message = "cannot be enumerated; give the values, or let hparams_search=optuna_tpe choose among them"
        raise ConfigError(
            [Violation(o.key_or_group, f"is {o.get_value_string()}, which {message}") for o in continuous]
        )
    zipped = options.zip
    swept = {key: override for key, override in by_key.items() if override.is_sweep_override()}
    # Check the size before anything is enumerated: range(1000000) is quickly typed.
    if size_violations := list(_check_size(swept, zipped, options.max_jobs)):
        raise ConfigError(size_violations)
    values = {key: [f"{key}={value}" for value in o.sweep_string_iterator()] for key, o in swept.items()}
    violations = [*_check_empty(values, by_key), *_check_duplicates(values), *_check_zip(zipped, values)]
    if violations:
        raise ConfigError(violations)
    jobs = list(_product(by_key, values, zipped))
    return _exclude(jobs, options.exclude)


def count_values(override: Override) -> int:
    """Return the number of values of a swept key, without enumerating a range.

    Raises:
        ValueError: if the key is swept over a range without an end or with a step of 0.
    """
    value = override.value()
    if not isinstance(value, RangeSweep):
        return len(value.list) if isinstance(value, ChoiceSweep) else sum(1 for _ in override.sweep_iterator())
    numbers = [Decimal(0 if number is None else number) for number in (value.start, value.stop, value.step)]
    if not all(number.is_finite() for number in numbers):
        raise ValueError("has no end; give finite numbers")
    start, stop, step = numbers
    if step == 0:
        raise ValueError("has a step of 0; give another")
    with localcontext(Context(prec=500)):
        return max(0, int(((stop - start) / step).to_integral_value(ROUND_CEILING)))


def _check_size(swept: dict[str, Override], zipped: Sequence[Sequence[str]], max_jobs: int) -> Iterator[Violation]:
    lengths = dict[str, int]()
    for key, override in swept.items():
        try:
            lengths[key] = count_values(override)
        except ValueError as error:
            yield Violation(key, f"is {override.get_value_string()}, which {error}")
    group_of = {key: tuple(group) for group in zipped for key in group}
    axes = dict.fromkeys(group_of.get(key, (key,)) for key in lengths)
    total = math.prod(max(lengths.get(key, 1) for key in axis) for axis in axes)
    if total > max_jobs:
        lines = ", ".join(f"{key} has {_format(length)} values" for key, length in lengths.items() if length > 1)
        message = (
            f"is {max_jobs} but the sweep has {_format(total)} jobs ({lines}); sweep over fewer values, or raise it"
        )
        yield Violation("hydra.sweeper.max_jobs", message)


def _format(number: int) -> str:
    return str(number) if number < 10**12 else f"about 10^{math.log10(number):.0f}"


def _check_empty(values: dict[str, list[str]], by_key: dict[str, Override]) -> Iterator[Violation]:
    for key, lines in values.items():
        if not lines:
            yield Violation(key, f"is {by_key[key].get_value_string()}, which gives no value; give at least one")


def _check_duplicates(values: dict[str, list[str]]) -> Iterator[Violation]:
    for key, lines in values.items():
        for line in [line for line, count in Counter(lines).items() if count > 1]:
            yield Violation(key, f"sweeps over {line.removeprefix(f'{key}=')} twice")


def _check_zip(zipped: Sequence[Sequence[str]], values: dict[str, list[str]]) -> Iterator[Violation]:
    keys = [key for group in zipped for key in group]
    for key in dict.fromkeys(keys):
        if key not in values:
            swept = f"; swept keys: {', '.join(values)}" if values else ""
            yield Violation(_ZIP, f"names {key}, which is not swept{nearest(key, values) or swept}")
        elif keys.count(key) > 1:
            yield Violation(_ZIP, f"names {key} more than once")
    for group in zipped:
        lengths = {key: len(values[key]) for key in group if key in values}
        if len(set(lengths.values())) > 1:
            lines = " and ".join(f"{key} has {length}" for key, length in lengths.items())
            yield Violation(_ZIP, f"pairs lists of different lengths: {lines}; give each the same number of values")


def _product(
    by_key: dict[str, Override], values: dict[str, list[str]], zipped: Sequence[Sequence[str]]
) -> Iterator[Job]:
    """Yield the jobs of the grid; each axis is one swept key, or several zipped keys at the position of the first."""
    group_of = {key: tuple(group) for group in zipped for key in group}
    axes = dict.fromkeys(group_of.get(key, (key,)) for key in values)
    choices = [list(zip(*(values[key] for key in axis), strict=True)) for axis in axes]
    names = [key for axis in axes for key in axis]
    for combination in itertools.product(*choices):
        swept = dict(zip(names, itertools.chain.from_iterable(combination), strict=True))
        overrides = tuple(swept[key] if key in swept else format_override(override) for key, override in by_key.items())
        yield Job(overrides=overrides, swept=tuple(swept[key] for key in values))


def format_override(override: Override) -> str:
    """Return an override as text, with numbers in Hydra's notation."""
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def _exclude(jobs: list[Job], exclusions: Iterable[str]) -> list[Job]:
    """Return the jobs that no exclusion matches.

    An exclusion without a match is an error, since it is probably a typo.
    """
    violations, remaining = [], jobs
    for text in map(str, exclusions):
        try:
            parsed = OverridesParser.create().parse_overrides(_OVERRIDE.findall(text))
            combination = set(map(format_override, parsed))
        except HydraException:
            violations.append(Violation(_EXCLUDE, f"has {text!r}, which is not of the form key=value key=value"))
            continue
        if not combination or not any(combination <= set(job.overrides) for job in jobs):
            violations.append(Violation(_EXCLUDE, f"has {text!r}, which matches no job of the sweep"))
        remaining = [job for job in remaining if not combination <= set(job.overrides)]
    if not remaining and not violations:
        violations.append(Violation(_EXCLUDE, f"excludes all {len(jobs)} jobs"))
    if violations:
        raise ConfigError(violations)
    return remaining
