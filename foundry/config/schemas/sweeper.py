"""Settings of sweeps (`hydra.sweeper`): the jobs of a sweep, and the metric for their comparison.

These settings belong to Hydra's part of the configuration, not to the configuration of a run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from foundry.config.checks.optuna_parts import check_part
from foundry.config.schemas.asha import ASHA
from foundry.config.schemas.evaluation import Direction
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation


@dataclass(frozen=True, kw_only=True)
class Sweeper:
    """Settings that grid sweeps and searches share."""

    params: dict[str, str] = setting(dict, "swept values by key, for keys that are not on the command line")
    metric: str | None = setting(
        "${evaluation.metric}", "metric for the comparison of jobs, by its name in metrics.jsonl"
    )
    direction: Direction = setting(
        "${direction_of:${.metric}}", "minimize: lower is better; maximize: higher is better"
    )

    def check(self) -> Iterator[Violation]:
        """Yield a violation for each invalid setting."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class Sweep(Sweeper):
    """A grid of all combinations of the swept values, without excluded ones; zipped keys vary together."""

    _target_: str = "hydra_plugins.foundry.GridSweeper"
    max_jobs: int = setting(
        5000,
        "maximum number of jobs, including excluded ones; larger sweeps are refused before any job is composed",
        ge=1,
        le=10**6,
    )
    max_batch_size: int | None = setting(
        None, "jobs passed to the launcher at a time; null: all of them", ge=1, le=10**9
    )
    zip: list[Any] = setting(list, "lists of swept keys whose values are paired, the first with the first")
    exclude: list[str] = setting(list, "combinations to exclude, such as 'hparams.lr=1e-2 optimizer=sgd'")

    def check(self) -> Iterator[Violation]:
        """Yield a violation for each entry of `zip` that is not a list of at least two keys."""
        for group in self.zip:
            is_list = isinstance(group, list) and all(isinstance(key, str) for key in group)
            if not is_list or len(group) < 2:
                text = str(group).replace("'", "")
                yield Violation(
                    "hydra.sweeper.zip", f"has {text}, which is not a list of at least two keys; write [[key1,key2]]"
                )


class Wait(Enum):
    """Jobs that a search waits for before it proposes the next one."""

    none = "none"
    batch = "batch"


@dataclass(frozen=True, kw_only=True)
class Search(Sweeper):
    """A search by Optuna, which proposes each job from the results of the previous ones."""

    _target_: str = "hydra_plugins.foundry.OptunaSweeper"
    _recursive_: bool = False
    n_trials: int = setting(
        20, "total number of jobs, including jobs of earlier starts of the same search", ge=1, le=10**6
    )
    n_jobs: int = setting(1, "maximum number of jobs at a time, for launchers that run several", ge=1, le=1024)
    wait: Wait | None = setting(
        None,
        "none: as soon as a job has ended, the next one is proposed; batch: the next n_jobs jobs are proposed when all "
        "have ended; null: as the search began, and none for a new one",
    )
    max_failures: int | None = setting(
        5, "number of failed jobs after which the search ends; null: it continues", ge=1, le=10**6
    )
    storage: str | None = setting(
        None,
        "study that several commands share: a journal file on a shared disk, or the URL of a database, such as "
        "postgresql+psycopg://host/name or, with a password, ${oc.env:NAME}; null: a file in the sweep directory",
    )
    study_name: str = setting("search", "name of the study in hydra.sweeper.storage")
    sampler: dict[str, Any] = setting(
        dict, "Optuna sampler: `_target_` and its arguments; `seed` makes it reproducible"
    )
    pruner: dict[str, Any] | None = setting(
        None,
        "asha, which pauses jobs at rungs; or an Optuna pruner, which ends jobs with poor evaluations and whose steps "
        "are thousandths of a run; null: every job trains to its end",
    )

    def check(self) -> Iterator[Violation]:
        """Yield a violation for an invalid sampler, pruner or storage, and a metric of null."""
        if self.metric is None:
            yield Violation("hydra.sweeper.metric", "is null but a search compares jobs by this metric; name a metric")
        yield from check_part("sampler", self.sampler, "hydra.sweeper.sampler")
        try:
            if self.asha is not None:
                yield from self._check_asha()
            elif self.pruner is not None:
                yield from check_part("pruner", self.pruner, "hydra.sweeper.pruner")
        except ConfigError as error:
            yield from error.violations
        if self.storage is not None and not self.storage.strip():
            yield Violation("hydra.sweeper.storage", "is empty; set the path of a file, a URL or null")
        if self.storage is not None and self.wait is Wait.batch:
            message = "is batch but commands that share a study do not wait for each other; omit it, or omit storage"
            yield Violation("hydra.sweeper.wait", message)

    @property
    def asha(self) -> ASHA | None:
        """Settings of successive halving; None if the search has another pruner, or none.

        Raises:
            ConfigError: a setting is unknown or invalid.
        """
        return ASHA.find(self.pruner)

    def _check_asha(self) -> Iterator[Violation]:
        if self.wait is Wait.batch:
            message = "is batch but asha promotes a job as soon as a place is free; omit it"
            yield Violation("hydra.sweeper.wait", message)
        if self.storage is not None:
            message = f"is {self.storage} but asha needs its own study in the sweep directory; omit it"
            yield Violation("hydra.sweeper.storage", message)


SCHEMAS: tuple[type[Sweeper], ...] = (Sweep, Search)
