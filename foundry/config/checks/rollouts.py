"""What learning from the model's own answers asks of the rest of a run, and what its environment does."""

from collections.abc import Iterator

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.build import field_of
from foundry.config.checks.targets import runtime_settings
from foundry.config.composition.store import writable
from foundry.config.diagnostics.elsewhere import own_options
from foundry.config.diagnostics.wanted import wanted
from foundry.config.metrics import EXACT_MATCH, HELD_OUT
from foundry.config.schemas.environment import InWorker, NoEnvironment, check_weights
from foundry.config.schemas.rollouts import Rollouts
from foundry.config.schemas.root import Config
from foundry.config.setting import check_fields
from foundry.core.errors import Violation, first_line, shown


def check_rollouts(config: Config) -> Iterator[Violation]:
    """Say where the batch, the environment or the evaluations are not those of a rollout."""
    objective, hparams = config.objective, config.hparams
    if not isinstance(objective, Rollouts) or not objective.generates:
        return
    name = getattr(objective, "described", type(objective).__name__)
    is_scored = getattr(config.environment, "_target_", "") is not None
    if objective.needs_rewards and not is_scored:
        options = ", ".join(option for option in own_options("environment") if option != "none")
        remedy = f"choose an option ({options}), or give _target_"
        yield Violation("environment", f"is none but objective {name} needs one that scores answers; {remedy}")
    rollout, updates = objective.samples_per_rollout, objective.updates_per_rollout
    if hparams.batch_schedule is not None or hparams.batch_ramp.start is not None:
        key = "batch_ramp" if hparams.batch_schedule is None else "batch_schedule"
        yield Violation(f"hparams.{key}", f"is given but a step of objective {name} has always the same size")
    elif hparams.global_batch_size * updates != rollout and rollout % updates == 0:
        answers = f"num_prompts_per_step {objective.num_prompts_per_step} x num_generations_per_prompt "
        answers += f"{objective.num_generations_per_prompt} / updates_per_rollout {updates} = {rollout // updates}"
        message = f"is {hparams.global_batch_size} but must be the answers of a step: {answers}"
        yield Violation("hparams.global_batch_size", message)
    if hparams.allow_rounding:
        yield Violation("hparams.allow_rounding", f"is True but objective {name} learns from all answers of a step")
    for key, node in config.evaluation.evaluators.items():
        if isinstance(node, dict) and node.get("_target_") == HELD_OUT:
            remedy = "reward" if objective.needs_rewards or is_scored else "answers"
            message = f"measures a held-out loss, which objective {name} has not; choose evaluation={remedy}"
            yield Violation(f"evaluation.evaluators.{key}", message)


def check_environment(config: Config) -> Iterator[Violation]:
    """Refuse an environment that scores nothing, and settings that no schema has read of one of the user's own."""
    if _is_idle(config):
        message = "is given but nothing in this run answers prompts; choose environment=none, objective=grpo, or add"
        remedy = f"'+evaluation.evaluators.exact_match._target_={EXACT_MATCH}'"
        yield Violation("environment", f"{message} {remedy}")
    limit, watchdog = field_of(config.environment, "timeout_seconds"), config.distributed.timeout_seconds
    if isinstance(limit, (int, float)) and limit >= watchdog:
        message = f"is {limit:g} but distributed.timeout_seconds={watchdog:g} would end the run first; raise that"
        yield Violation("environment.timeout_seconds", message)
    if not isinstance(config.environment, dict):
        return
    settings = writable(InWorker)
    settings._target_, wrong = "own", False
    for name in runtime_settings("environment"):
        try:
            if name in config.environment:
                settings[name] = config.environment[name]
        except OmegaConfBaseException as error:
            wrong, kind, key = True, wanted(error), str(error.full_key or name)
            value = OmegaConf.select(OmegaConf.create({name: config.environment[name]}), key)
            message = f"is {shown(value)} but must be {kind}" if kind else first_line(str(error))
            yield Violation(f"environment.{key}", message)
    if not wrong:
        read = OmegaConf.to_object(settings)
        assert isinstance(read, InWorker)
        yield from check_fields(read, "environment")
        yield from check_weights(read.weights)


def _is_idle(config: Config) -> bool:
    """Whether there is an environment, and neither objective, evaluators nor stop rules can ask it."""
    objective, evaluation = config.objective, config.evaluation
    is_own = isinstance(objective, dict) or objective._target_ != type(objective)._target_
    asks = isinstance(objective, Rollouts) and objective.generates
    if isinstance(config.environment, NoEnvironment) or is_own or asks:
        return False
    parts = [*evaluation.evaluators.values(), *evaluation.stop_rules.values()]
    return all(node is None or (isinstance(node, dict) and node.get("_target_") == HELD_OUT) for node in parts)
