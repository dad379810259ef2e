"""`hydra.sweeper.*`: which jobs a sweep has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from foundry.config.errors import Violation
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A grid over what is swept, except that zipped keys go together and excluded combinations are left out.

    It belongs to Hydra's part of the configuration, so it is no part of a run's.
    """

    _target_: str = "hydra_plugins.foundry.GridSweeper"
    max_batch_size: int | None = setting(None, "jobs handed to the launcher at a time; null: all of them", ge=1)
    params: dict[str, str] | None = setting(None, "what is swept, by key, where the command line does not say")
    zip: list[Any] = setting(list, "lists of swept keys whose values go together, the first with the first")
    exclude: list[str] = setting(list, "combinations to leave out, such as 'hparams.lr=1e-2 optimizer=sgd'")

    def check(self) -> Iterator[Violation]:
        """Yield a violation for each list of keys that is none."""
        for group in self.zip:
            if isinstance(group, str) or len(group) < 2:
                said = group if isinstance(group, str) else ",".join(group)
                yield Violation("hydra.sweeper.zip", f"has {said}, not a list of two keys or more; write [[key1,key2]]")
