"""Base class of the settings of launchers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from foundry.core.errors import Violation

PLUGINS = "hydra_plugins.foundry"
"""Module name for foundry's launchers: Hydra accepts launchers from its plugin package only."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Base class of launcher settings. Jobs run exactly the configuration that was checked at submission.

    Attributes:
        option: name of the launcher as an option of `hydra/launcher`.
        limit_remedy: for a launcher with `detach`, how to limit the jobs at a time to a number, `{}` in this text.
    """

    option: ClassVar[str]
    limit_remedy: ClassVar[str] = "leave one of them out"

    def check(self, nproc_per_node: int) -> Iterator[Violation]:
        """Check for settings that contradict each other or `distributed.nproc_per_node`."""
        yield from ()
