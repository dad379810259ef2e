"""Evaluator of a policy's success rate in simulated episodes."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from foundry.config.configured import configured_by
from foundry.core.protocols import EvaluationContext
from foundry.core.simulator import Simulator
from foundry.data.splits import DataSplits
from foundry.parallel.gathering import gather
from foundry.parallel.whole_weights import gathered
from foundry.run_dir.files import make_folder, read_text, write_atomically
from foundry.tasks.robots.evaluators.episodes import Episode, Film, Rollouts
from foundry.tasks.robots.evaluators.films import save_gif
from foundry.tasks.robots.evaluators.rates import wilson_interval
from foundry.tasks.robots.names import ROLLOUTS, SUCCESS_METRICS
from foundry.tasks.robots.protocols import ActingObjective
from foundry.tasks.robots.schemas.evaluators import InstructionChoice
from foundry.tasks.robots.schemas.evaluators import Success as SuccessSettings

log = logging.getLogger(__name__)

_NUM_FILMS = 8


class Success:
    """Success rate of a policy with its 95 % interval; an episode is a success if any of its steps is.

    Episode k starts from the simulator's seed k, independent of the run's seed, so that all runs are compared on the
    same starts. The random numbers of the n-th chunk of actions are keyed by the run's seed, k and n. Episodes run in
    groups of `at_a_time`, which are divided among the ranks; each rank needs memory for the whole model.

    Rank 0 writes rollouts.jsonl, a line per episode, and with `draw` a GIF of the first episodes, at most 8.

    Args:
        settings: the episodes, how many run at a time, and the policy's observations and instructions. The policy may
            receive another instruction than the episode's, while success is measured for the episode's own; then a low
            rate shows that the policy follows instructions.
        objective: objective of the policy.
        data: the data, with `statistics`.
        simulator: creates a simulator.

    Raises:
        ConfigError: see `Rollouts`.
    """

    metrics: tuple[str, ...] = SUCCESS_METRICS

    @configured_by(SuccessSettings)
    def __init__(
        self,
        settings: SuccessSettings,
        *,
        objective: ActingObjective,
        data: DataSplits,
        simulator: Callable[[], Simulator] | None,
    ) -> None:
        self._rollouts = Rollouts(
            objective=objective,
            data=data,
            simulator=simulator,
            num_observations=settings.num_observations,
            at_a_time=settings.at_a_time,
            instruction_tokens=settings.instruction_tokens,
            uses_other_instruction=InstructionChoice(settings.instruction) is InstructionChoice.other,
        )
        self._numbers = range(settings.first_episode, settings.first_episode + settings.episodes)
        self._draw = settings.draw

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> dict[str, float]:
        """Run the episodes; every rank gets the same metrics, independent of the number of ranks."""
        world = context.world
        chunks = self._rollouts.chunks(self._numbers)
        local, films = list[Episode](), list[Film]()
        with gathered(model) as full_model:
            for index in range(world.dp_rank, len(chunks), world.dp_size):
                chunk_episodes, chunk_films = self._rollouts.run(
                    full_model,
                    chunks[index],
                    device=world.device,
                    autocast=context.autocast,
                    heartbeat=context.heartbeat,
                    num_films=_NUM_FILMS if self._draw and world.is_main and index == 0 else 0,
                )
                local += chunk_episodes if world.leads_share else []
                films += chunk_films
        episodes = sorted((episode for part in gather(local, world) for episode in part), key=lambda item: item.number)
        if world.is_main:
            try:
                self._write(episodes, films, context)
            except OSError as error:
                log.warning("no episodes are written: %s (the run continues)", error)
        return summary(episodes)

    def close(self) -> None:
        """Close the simulators."""
        self._rollouts.close()

    def _write(self, episodes: Sequence[Episode], films: Sequence[Film], context: EvaluationContext) -> None:
        folder = make_folder(context.folder)
        _add_lines(folder / ROLLOUTS, context.step, episodes)
        if films:
            save_gif(films, folder / f"rollouts_{context.step:08d}.gif")
            gif = folder / "rollouts.gif"
            save_gif(films, gif)
            context.files.append(gif)


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics `SUCCESS_METRICS` of one or more episodes, by name."""
    successes = sum(episode.success for episode in episodes)
    low, high = wilson_interval(successes, len(episodes))
    length = sum(episode.length for episode in episodes) / len(episodes)
    return dict(zip(SUCCESS_METRICS, (successes / len(episodes), low, high, length), strict=True))


def _add_lines(file: Path, step: int, episodes: Sequence[Episode]) -> None:
    """Add the episodes of a step, and drop records of this and later steps that an interrupted run has written."""
    try:
        lines = read_text(file).splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        lines = []
    records = [line for line in lines if _step_of(line) < step]
    records += [json.dumps({"step": step, **episode.to_record()}) for episode in episodes]
    write_atomically(file, "".join(f"{line}\n" for line in records))


def _step_of(line: str) -> float:
    """Return the step of a record; infinity, so that the line is dropped, if it is not a valid record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
