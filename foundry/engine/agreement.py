"""Work of every rank at the start of a run; if it fails on one rank, all ranks raise its error."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from foundry.core.errors import ConfigError, Violation
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World

_T = TypeVar("_T")


def on_all_ranks(work: Callable[[], _T], world: World, explain: Callable[[OSError], Violation]) -> Sequence[_T]:
    """Call a function on every rank and return the results of all ranks, in their order.

    Args:
        work: the function; a rank with nothing to do passes one that returns None.
        world: all its ranks call this function together.
        explain: converts an OSError of `work` to the message of a setting.

    Raises:
        ConfigError: on every rank, if `work` has raised a ConfigError or an OSError on any rank.
    """
    result: _T | None = None
    violations = list[tuple[str, str]]()
    try:
        result = work()
    except ConfigError as error:
        violations = [(violation.key, violation.message) for violation in error.violations]
    except OSError as error:
        violation = explain(error)
        violations = [(violation.key, violation.message)]
    gathered = gather((result, violations), world)
    if errors := [Violation(*violation) for _, others in gathered for violation in others]:
        raise ConfigError(errors)
    return [result for result, _ in gathered]  # type: ignore[misc]
