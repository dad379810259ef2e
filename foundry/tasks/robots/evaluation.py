"""Evaluation of a policy in a simulator by `foundry.eval`, alone or compared with another on the same episodes."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foundry.config.build import field_of
from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.engine.restore import RestoredRun, build_part, explained, restore
from foundry.parallel.precision import PrecisionPolicy, fp32_arithmetic
from foundry.parts.data import simulator_factory
from foundry.run_dir.files import make_folder, write_atomically
from foundry.run_dir.names import CONFIG
from foundry.tasks.robots.checks.success import check_success
from foundry.tasks.robots.data.statistics import statistics_of
from foundry.tasks.robots.evaluators.episodes import Episode, Film, Rollouts
from foundry.tasks.robots.evaluators.films import save_gif
from foundry.tasks.robots.evaluators.rates import sign_test
from foundry.tasks.robots.evaluators.success import summary
from foundry.tasks.robots.names import ROLLOUTS
from foundry.tasks.robots.schemas.evaluators import MOST_EPISODES, InstructionChoice, Success

_DEFAULTS = {"episodes": 50, "at_a_time": 25, "first_episode": 0}
_FILM_PIXELS = 160


def evaluate_policy(
    run: Path,
    which: str,
    *,
    against: Path | None = None,
    against_which: str = "last",
    record: Path | None = None,
    ema: bool = True,
    trust: bool = False,
    episodes: int | None = None,
    first_episode: int | None = None,
    at_a_time: int | None = None,
    instruction: InstructionChoice = InstructionChoice.own,
    device: DeviceKind = DeviceKind.auto,
    simulator: Callable[[int | None], Any] | None = None,
) -> dict[str, Any]:
    """Run a policy in episodes, and optionally another policy in the same episodes.

    Both policies use the same random numbers if their runs have the same seed.

    Args:
        run: run directory; its statistics are used in place of the demonstrations.
        which: checkpoint of the run.
        against: run directory of the other policy; None for no comparison.
        against_which: checkpoint of the other policy.
        record: folder for a GIF and a JSON line per episode; None to write neither.
        ema: use averaged weights if the checkpoint has them.
        trust: instantiate parts that are not foundry's own.
        episodes: number of episodes; None uses the setting of the run's own evaluations.
        first_episode: number of the first episode; None uses the setting of the run's own evaluations.
        at_a_time: episodes per batch; None uses the setting of the run's own evaluations.
        instruction: which instruction the policies receive, if they receive any.
        device: kind of the compute device.
        simulator: function of the image size of a policy (None without images) that returns simulator settings; None
            uses each policy's own simulator.

    Returns:
        The measurements, by name.

    Raises:
        ConfigError: if a run cannot be opened or has no policy or simulator, if the simulators of the two policies
            differ, or if the chosen simulator does not match a policy.
    """
    policy = _open(run, which, "run", "which", ema=ema, trust=trust, device=device)
    runs = [_set_simulator(policy, run, "run", simulator)]
    if against is not None:
        other = _open(against, against_which, "against", "against_which", ema=ema, trust=trust, device=device)
        runs.append(_set_simulator(other, against, "against", simulator))
        _check_same_task(against, runs[0].config, runs[1].config)
    if instruction is InstructionChoice.other and not field_of(runs[0].config.data, "instruction_tokens"):
        message = f"is other but the policy of {run} reads no instructions: it has no data.instruction_tokens"
        raise ConfigError(Violation("instruction", f"{message}; leave it out"))
    settings = _episode_settings(
        runs[0].config, {"episodes": episodes, "first_episode": first_episode, "at_a_time": at_a_time}
    )
    numbers = range(settings["first_episode"], settings["first_episode"] + settings["episodes"])
    with ExitStack() as stack, torch.no_grad():
        policies = [_Policy(item, settings["at_a_time"], instruction, stack) for item in runs]
        results = _run(policies, numbers, record)
    result: dict[str, Any] = {
        "checkpoint": runs[0].checkpoint.name,
        **summary(results[0]),
        "num_episodes": len(numbers),
        **({} if instruction is InstructionChoice.own else {"instruction": instruction.value}),
    }
    return result if against is None else result | _compare(f"{against} {runs[1].checkpoint.name}", *results)


def _compare(name: str, episodes: Sequence[Episode], other_episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the measurements of the other policy, which is called `name`, and the differences between both."""
    pairs = [(first.success, second.success) for first, second in zip(episodes, other_episodes, strict=True)]
    counts, other_summary = (pairs.count((True, False)), pairs.count((False, True))), summary(other_episodes)
    return {
        "against": name,
        **{f"against_{key}": value for key, value in other_summary.items()},
        "difference": summary(episodes)["success"] - other_summary["success"],
        "only_run": counts[0],
        "only_against": counts[1],
        "p_value": sign_test(*counts),
    }


def _open(path: Path, which: str, path_key: str, which_key: str, **options: Any) -> RestoredRun:
    """Restore a policy; errors name the command's options `path_key` and `which_key`."""
    keys = {"run": path_key, "which": which_key}
    try:
        restored = restore(path, which, **options)
    except ConfigError as error:
        raise ConfigError(Violation(keys.get(item.key, item.key), item.message) for item in error.violations) from None
    if statistics_of(restored.data) is None:
        raise ConfigError(
            Violation(path_key, f"is {path}, whose model is not a policy: it has no statistics of actions")
        )
    return restored


def _set_simulator(
    restored: RestoredRun, path: Path, key: str, simulator: Callable[[int | None], Any] | None
) -> RestoredRun:
    """Return the run with the settings that `simulator` returns, or with its own simulator if `simulator` is None.

    Raises:
        ConfigError: if there is no simulator, or it does not match the policy or its evaluators.
    """
    if simulator is not None:
        node = simulator(field_of(restored.config.data, "image_size"))
        restored = replace(restored, config=replace(restored.config, simulator=node))
    if field_of(restored.config.simulator, "_target_") is None:
        message = f"is {path}, a run with simulator=none"
        remedy = "choose one, such as simulator=around, or measure the loss on episodes with data=lerobot data.path=DIR"
        raise ConfigError(Violation(key, f"{message}; {remedy}"))
    if simulator is not None:
        _check_sizes(restored, path)
    if violations := list(check_success(restored.config)):
        raise ConfigError(Violation(key, f"{path / CONFIG}: {violation}") for violation in violations)
    return restored


def _check_sizes(restored: RestoredRun, path: Path) -> None:
    """Check that the sizes of the simulator's states, actions and images match those used in training.

    Raises:
        ConfigError: if they differ; sizes that a user-defined simulator does not set are not checked.
    """
    node = restored.config.simulator
    statistics = statistics_of(restored.data)
    assert statistics is not None
    expected = {
        "state_dim": len(statistics.state.mean),
        "action_dim": len(statistics.actions.mean),
        "image_size": field_of(restored.config.data, "image_size"),
    }
    actual = {name: field_of(node, name, size) for name, size in expected.items()}
    names = [name for name in expected if actual[name] != expected[name]]
    if names:
        has, wants = (" and ".join(f"{name}={as_text(sizes[name])}" for name in names) for sizes in (actual, expected))
        message = f"has {has} but the policy of {path} was trained with {wants}; choose the simulator of its task"
        raise ConfigError(Violation("simulator", message))


def _check_same_task(path: Path, config: Config, other: Config) -> None:
    """Check that the simulators of two policies have the same task; the observations may differ.

    Raises:
        ConfigError: if a setting of the simulators differs, except `state_dim` and `image_size`.
    """
    first, second = _task(config), _task(other)
    names = [name for name in first | second if first.get(name) != second.get(name)]
    if names:
        name = names[0]
        message = f"is {path}, whose simulator has {name}={second.get(name)} but that of run has {first.get(name)}"
        raise ConfigError(Violation("against", f"{message}; compare policies of the same task"))


def _task(config: Config) -> dict[str, Any]:
    node = config.simulator
    settings = {item.name: getattr(node, item.name) for item in fields(node)} if is_dataclass(node) else dict(node)
    return {name: value for name, value in settings.items() if name not in ("state_dim", "image_size")}


def _episode_settings(config: Config, options: Mapping[str, int | None]) -> dict[str, int]:
    """Return the options that are set, else the settings of the run's first evaluator of success, else `_DEFAULTS`.

    Raises:
        ConfigError: if the last episode has a number above the largest one.
    """
    nodes = [
        node for node in config.evaluation.evaluators.values() if node and node.get("_target_") == Success._target_
    ]
    settings = _DEFAULTS | {name: node[name] for node in nodes[:1] for name in _DEFAULTS if name in node}
    settings |= {name: number for name, number in options.items() if number is not None}
    if (end := settings["first_episode"] + settings["episodes"]) > MOST_EPISODES:
        message = f"is {settings['episodes']} but leads to episode {end - 1}; the last one is {MOST_EPISODES - 1}"
        raise ConfigError(Violation("episodes", message))
    return settings


class _Policy:
    """A restored policy that is ready to act."""

    def __init__(self, restored: RestoredRun, at_a_time: int, instruction: InstructionChoice, stack: ExitStack) -> None:
        config, self._device = restored.config, restored.device
        self._precision = PrecisionPolicy.from_config(config.precision, self._device)
        self._tf32 = config.precision.tf32
        self._model = self._precision.prepare(restored.model)
        self._error_context = f"{restored.checkpoint} cannot be evaluated", config, "model", "objective", "simulator"
        self.rollouts = Rollouts(
            objective=build_part(config, "objective"),
            data=restored.data,
            simulator=simulator_factory(config.simulator),
            num_observations=field_of(config.data, "num_observations", 2),
            at_a_time=at_a_time,
            instruction_tokens=field_of(config.data, "instruction_tokens"),
            uses_other_instruction=instruction is InstructionChoice.other,
        )
        stack.enter_context(closing(self.rollouts))

    def run(self, chunk: range, *, num_films: int) -> tuple[list[Episode], list[Film]]:
        """Run a chunk of episodes and record films of the first `num_films` of them."""
        with explained(*self._error_context), fp32_arithmetic(tf32=self._tf32):
            return self.rollouts.run(
                self._model,
                chunk,
                device=self._device,
                autocast=partial(self._precision.autocast, self._device),
                heartbeat=lambda activity: None,
                num_films=num_films,
                size=_FILM_PIXELS,
            )


def _run(policies: Sequence[_Policy], numbers: range, record: Path | None) -> list[list[Episode]]:
    """Run the episodes of each policy, in chunks to limit the images in memory, and return them by policy."""
    results: list[list[Episode]] = [[] for _ in policies]
    folder = None if record is None else make_folder(record, parents=True)
    for chunk in policies[0].rollouts.chunks(numbers):
        outcomes = [policy.run(chunk, num_films=0 if folder is None else len(chunk)) for policy in policies]
        for policy_results, (episodes, _) in zip(results, outcomes, strict=True):
            policy_results += episodes
        # A GIF shows the films of all policies side by side; if one of the simulators cannot render, there is no GIF.
        for number, films in zip(chunk, zip(*(films for _, films in outcomes), strict=False), strict=False):
            if folder is not None:
                save_gif(films, folder / f"episode_{number:05d}.gif")
    if folder is not None:
        lines = [_line(*pair) for pair in zip(*results, strict=True)]
        write_atomically(folder / ROLLOUTS, "".join(f"{line}\n" for line in lines))
    return results


def _line(episode: Episode, other: Episode | None = None) -> str:
    """Return a JSON line with the result of an episode, and that of the other policy if there is one."""
    comparison = {} if other is None else {"against_success": other.success, "against_length": other.length}
    return json.dumps({**episode.to_record(), **comparison})
