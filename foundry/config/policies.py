"""What a policy asks of the rest of a run."""

from collections.abc import Iterator

from foundry.config.errors import Violation
from foundry.config.metrics import SUCCESS
from foundry.config.schemas.action_chunks import ActionChunks
from foundry.config.schemas.data import Episodes
from foundry.config.schemas.model import PolicyDiT
from foundry.config.schemas.root import Config


def check_policies(config: Config) -> Iterator[Violation]:
    """Say where success is measured of what does not act, and where a model looks at pictures that there are not."""
    objective, model, data = config.objective, config.model, config.data
    is_own = isinstance(objective, dict) or objective._target_ != type(objective)._target_
    for name, node in config.evaluation.evaluators.items():
        measures_success = isinstance(node, dict) and node.get("_target_") == SUCCESS
        if measures_success and not is_own and not isinstance(objective, ActionChunks):
            message = f"measures a policy but objective {type(objective).__name__} has none; choose "
            message += "objective=diffusion_policy, or evaluation=default"
            yield Violation(f"evaluation.evaluators.{name}", message)
    size = model.image_size if isinstance(model, PolicyDiT) and isinstance(data, Episodes) else None
    if size is not None and data.image_size is None:
        message = f"is {size} but data.image_size is null: there are no pictures"
        yield Violation("model.image_size", f"{message}; leave it out to follow the data")
