"""Check of the rungs of `hydra/sweeper/pruner=asha` against the length of each job."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry.config.checks.rules import find_budget
from foundry.config.environment import Launch
from foundry.config.schemas.asha import ASHA, KEY
from foundry.config.schemas.root import Config
from foundry.core.duration import Duration, check_rung
from foundry.core.errors import ConfigError, Violation


def check_rungs(composed: DictConfig, config: Config, launch: Launch) -> Iterator[Violation]:
    """Check that a job of a search with rungs can pause at one, and that the search has enough jobs for its rungs.

    If the run's length is known only with the data, the run checks its first rung itself.
    """
    sweeper = OmegaConf.select(composed, "hydra.sweeper")
    pruner = None if sweeper is None or "pruner" not in (sweeper._content or ()) else sweeper.get("pruner")
    node: Any = OmegaConf.to_container(pruner) if OmegaConf.is_dict(pruner) else None
    try:
        asha = ASHA.find(node)
        if asha is None:
            return
        if config.checkpoint.is_off:
            message = (
                "saves nothing, but a search with rungs continues its jobs from checkpoints; set checkpoint=default"
            )
            yield Violation("checkpoint", message)
        first = Duration.parse(asha.min_resource)
        budget = find_budget(config, launch, [first.unit])
    except ConfigError:
        return  # reported with the settings of the sweeper, or of the run
    if budget is None:
        return
    try:
        check_rung(first, budget)
    except ValueError as error:
        yield Violation(f"{KEY}.min_resource", str(error))
        return
    rungs = 1
    while (length := asha.length(rungs + 1)) is not None and length.samples(budget) < budget.total_samples:
        rungs += 1
    needed, factor = asha.reduction_factor**rungs, asha.reduction_factor
    if sweeper.n_trials < needed:
        fitting = max((count for count in range(1, rungs) if factor**count <= sweeper.n_trials), default=None)
        remedy = "raise it" if fitting is None else f"raise it, or set {KEY}.max_rungs={fitting}"
        message = f"is {sweeper.n_trials}, but with {rungs} rung{'s' * (rungs != 1)} and reduction_factor={factor} only"
        yield Violation("hydra.sweeper.n_trials", f"{message} one of {needed} jobs trains to its end; {remedy}")
