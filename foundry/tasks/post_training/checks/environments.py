"""Checks of the environment: that the run uses it, and the settings of user-defined environments."""

from collections.abc import Iterator

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.build import field_of
from foundry.config.checks.targets import runtime_settings
from foundry.config.composition.store import writable
from foundry.config.diagnostics.expected_value import expected_kind
from foundry.config.metrics import EXACT_MATCH, HELD_OUT
from foundry.config.schemas.environment import NoEnvironment
from foundry.config.schemas.root import Config
from foundry.config.setting import check_fields
from foundry.core.errors import Violation, as_text, first_line
from foundry.tasks.post_training.schemas.environment import InWorker, check_weights
from foundry.tasks.post_training.schemas.rollouts import Rollouts


def check_environment(config: Config) -> Iterator[Violation]:
    """Reject an unused environment, a timeout not below the watchdog's, and invalid settings of a user's environment.

    Settings of user-defined environments have no schema, so composition has not checked their types.
    """
    if _is_idle(config):
        message = (
            "is set but nothing in this run generates completions; choose environment=none, objective=grpo, or add"
        )
        remedy = f"'+evaluation.evaluators.exact_match._target_={EXACT_MATCH}'"
        yield Violation("environment", f"{message} {remedy}")
    limit, watchdog = field_of(config.environment, "timeout_seconds"), config.distributed.timeout_seconds
    if isinstance(limit, (int, float)) and limit >= watchdog:
        message = (
            f"is {limit:g} but distributed.timeout_seconds={watchdog:g} would end the run first; "
            "raise distributed.timeout_seconds"
        )
        yield Violation("environment.timeout_seconds", message)
    if not isinstance(config.environment, dict):
        return
    settings = writable(InWorker)
    settings._target_, is_invalid = "own", False
    for name in runtime_settings("environment"):
        try:
            if name in config.environment:
                OmegaConf.update(settings, name, config.environment[name], merge=False)
        except OmegaConfBaseException as error:
            is_invalid, kind, key = True, expected_kind(error), str(error.full_key or name)
            value = OmegaConf.select(OmegaConf.create({name: config.environment[name]}), key)
            message = f"is {as_text(value)} but must be {kind}" if kind else first_line(str(error))
            yield Violation(f"environment.{key}", message)
    if not is_invalid:
        settings_object = OmegaConf.to_object(settings)
        assert isinstance(settings_object, InWorker)
        yield from check_fields(settings_object, "environment")
        yield from check_weights(settings_object.weights)


def _is_idle(config: Config) -> bool:
    """Return whether the run has an environment that its objective, evaluators and stop rules cannot use."""
    objective, evaluation = config.objective, config.evaluation
    is_custom = isinstance(objective, dict) or objective._target_ != type(objective)._target_
    generates = isinstance(objective, Rollouts) and objective.generates
    if isinstance(config.environment, NoEnvironment) or is_custom or generates:
        return False
    parts = [*evaluation.evaluators.values(), *evaluation.stop_rules.values()]
    return all(node is None or (isinstance(node, dict) and node.get("_target_") == HELD_OUT) for node in parts)
