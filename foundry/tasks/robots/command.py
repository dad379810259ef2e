"""Options of `foundry.eval` for policies, and checks that do not need torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foundry.config.build import field_of
from foundry.config.command import check_output_folder, folder_option
from foundry.config.schemas.root import Config
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.tasks.robots.schemas.evaluators import MOST_EPISODES, InstructionChoice

Compose = Callable[[Sequence[str]], Config]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Options of the evaluation of a policy."""

    episodes: int | None = setting(
        None, "number of episodes for a policy, in its simulator; null: as in the run's evaluations", ge=1
    )
    first_episode: int | None = setting(
        None, "number of the first episode; null: as in the run's evaluations", ge=0, le=MOST_EPISODES - 1
    )
    against: str | None = setting(None, "second run directory, whose policy is compared on the same episodes")
    against_which: str | None = setting(None, "checkpoint of that run; null: as `which`")
    record: str | None = setting(None, "new or empty folder for an animation of each episode; null: no animations")
    instruction: InstructionChoice = setting(
        InstructionChoice.own,
        "instruction for a policy: own: the episode's; other: a different one, with success still measured for the "
        "episode's",
    )


def measure(path: Path, options: Any, simulator: Sequence[str], compose: Compose) -> dict[str, Any]:
    """Evaluate the policy of a run, in its own simulator or in one chosen by overrides.

    Args:
        path: run directory.
        options: options of the command.
        simulator: overrides of the config group `simulator`.
        compose: returns the configuration for a list of overrides.

    Raises:
        ConfigError: if an option is invalid, the run or checkpoint does not exist, or the simulator does not match the
            model.
    """
    against = None if options.against is None else folder_option("against", options.against)
    if against is None and options.against_which is not None:
        raise ConfigError(
            Violation("against_which", f"is {options.against_which} but has no effect without against; add against=DIR")
        )
    record = None if options.record is None else folder_option("record", options.record)
    if record is not None:
        check_output_folder("record", record)
    from foundry.tasks.robots.evaluation import evaluate_policy

    return evaluate_policy(
        path,
        options.which,
        against=against,
        against_which=options.which if options.against_which is None else options.against_which,
        record=record,
        ema=options.ema,
        trust=options.trust,
        episodes=options.episodes,
        first_episode=options.first_episode,
        at_a_time=options.batch_size,
        instruction=InstructionChoice(options.instruction),
        device=options.device,
        simulator=partial(_compose_simulator, simulator, compose) if simulator else None,
    )


def _compose_simulator(overrides: Sequence[str], compose: Compose, image_size: int | None) -> Any:
    """Return the simulator chosen by overrides, with `image_size` as its image size if it has none.

    Raises:
        ConfigError: if the overrides are invalid.
    """
    node = compose(overrides).simulator
    if image_size is None or field_of(node, "_target_") is None or field_of(node, "image_size") is not None:
        return node
    return compose([*overrides, f"++simulator.image_size={image_size}"]).simulator
