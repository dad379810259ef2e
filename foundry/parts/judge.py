"""Builder of the judge that scores completions."""

from typing import TYPE_CHECKING, Any

from foundry.config.build import field_of
from foundry.core.tasks import builder_of

if TYPE_CHECKING:
    from foundry.generation.scoring import Judge


def build_judge(node: Any) -> "Judge | None":
    """Build the judge of a run from the config group `environment`; return None if the run has no environment.

    Raises:
        ConfigError: no installed task uses environments, or the environment cannot be built.
    """
    if field_of(node, "_target_") is None:
        return None
    judge: Judge = builder_of("environment")(node)
    return judge
