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
from foundry.tasks.robots.schemas.evaluators import Success as SuccessSettings
from foundry.tasks.robots.schemas.evaluators import Told

log = logging.getLogger(__name__)

_DRAWN = 8


class Success:
    """Success rate of a policy with its 95 % interval; an episode is a success if any of its steps is.

    Episode k starts from the simulator's seed k, independent of the run's seed, so that all runs are compared on the
    same starts. The random numbers of its n-th chunk of actions are keyed by the run's seed, k and n. Episodes run in
    chunks of fixed size, which the ranks share; each rank needs memory for the whole model.

    Rank 0 writes rollouts.jsonl, a line per episode, and a GIF of the first 8 episodes.

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
            is_told_another=Told(settings.instruction) is Told.other,
        )
        self._numbers = range(settings.first_episode, settings.first_episode + settings.episodes)
        self._draw = settings.draw

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> dict[str, float]:
        """Run the episodes; every rank gets the same metrics, independent of the number of ranks."""
        world = context.world
        chunks = self._rollouts.chunks(self._numbers)
        own, films = list[Episode](), list[Film]()
        with gathered(model) as whole:
            for index in range(world.dp_rank, len(chunks), world.dp_size):
                found, drawn = self._rollouts.run(
                    whole,
                    chunks[index],
                    device=world.device,
                    autocast=context.autocast,
                    heartbeat=context.heartbeat,
                    drawn=_DRAWN if self._draw and world.is_main and index == 0 else 0,
                )
                own += found if world.leads_share else []
                films += drawn
        every = sorted((episode for part in gather(own, world) for episode in part), key=lambda one: one.number)
        if world.is_main:
            try:
                self._write(every, films, context)
            except OSError as error:
                log.warning("no episodes are written: %s (the run continues)", error)
        return summary(every)

    def close(self) -> None:
        """Close the simulators."""
        self._rollouts.close()

    def _write(self, episodes: Sequence[Episode], films: Sequence[Film], context: EvaluationContext) -> None:
        folder = make_folder(context.folder)
        _add_lines(folder / ROLLOUTS, context.step, episodes)
        if films:
            save_gif(films, folder / f"rollouts_{context.step:08d}.gif")
            newest = folder / "rollouts.gif"
            save_gif(films, newest)
            context.files.append(newest)


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of at least one episode, by name."""
    solved = sum(episode.success for episode in episodes)
    low, high = wilson_interval(solved, len(episodes))
    length = sum(episode.length for episode in episodes) / len(episodes)
    return dict(zip(SUCCESS_METRICS, (solved / len(episodes), low, high, length), strict=True))


def _add_lines(file: Path, step: int, episodes: Sequence[Episode]) -> None:
    """Add the episodes of a step, and drop records of this and later steps that an interrupted run has written."""
    try:
        lines = read_text(file).splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        lines = []
    kept = [line for line in lines if _step_of(line) < step]
    kept += [json.dumps({"step": step, **episode.to_record()}) for episode in episodes]
    write_atomically(file, "".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    """Return the step of a record; infinity, so that the line is dropped, if it is not a valid record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
