"""Settings of sweeps (`hydra.sweeper`): the jobs of a sweep, and the metric for their comparison.

These settings belong to Hydra's part of the configuration, not to the configuration of a run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from foundry.config.checks.optuna_parts import check_part
from foundry.config.schemas.evaluation import Direction
from foundry.config.setting import setting
from foundry.core.errors import Violation


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


@dataclass(frozen=True, kw_only=True)
class Search(Sweeper):
    """A search by Optuna, which proposes each job from the results of the previous ones."""

    _target_: str = "hydra_plugins.foundry.OptunaSweeper"
    _recursive_: bool = False
    n_trials: int = setting(
        20, "total number of jobs, including jobs of earlier starts of the same search", ge=1, le=10**6
    )
    n_jobs: int = setting(1, "jobs proposed at a time, for launchers that run several in parallel", ge=1, le=1024)
    max_failures: int | None = setting(
        5, "number of failed jobs after which the search ends; null: it continues", ge=1, le=10**6
    )
    sampler: dict[str, Any] = setting(
        dict, "Optuna sampler: `_target_` and its arguments; `seed` makes it reproducible"
    )
    pruner: dict[str, Any] | None = setting(
        None,
        "Optuna pruner, which ends jobs with poor evaluations; its steps are thousandths of a run; null: no job is "
        "ended",
    )

    def check(self) -> Iterator[Violation]:
        """Yield a violation for an invalid sampler, an invalid pruner and a metric of null."""
        if self.metric is None:
            yield Violation("hydra.sweeper.metric", "is null but a search compares jobs by this metric; name a metric")
        for name, node in (("sampler", self.sampler), ("pruner", self.pruner)):
            if node is not None:
                yield from check_part(name, node, f"hydra.sweeper.{name}")


SCHEMAS: tuple[type[Sweeper], ...] = (Sweep, Search)
