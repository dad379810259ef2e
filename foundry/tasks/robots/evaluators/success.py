"""Whether a policy does its task, in episodes of a simulator."""

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
    """The share of episodes in which a policy does its task at any step, with its 95 % interval.

    Episode k starts from the simulator's seed k, whatever the seed of the run, so that all runs are compared on the
    same starts; what is drawn for its n-th chunk of actions is keyed by the run's seed, k and n. Episodes are run in
    chunks of fixed size, which ranks share; each needs memory for the whole model.

    Rank 0 writes rollouts.jsonl, a line for each episode, and a moving picture of the first 8.

    Args:
        settings: which episodes, how many at a time, and what the policy is shown and told. If it is told another
            instruction than the episode's, whose success is still measured, a low figure says that words are heeded.
        objective: acts.
        data: has `statistics`.
        simulator: makes a simulator.

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
        """Run the episodes; every rank has the same numbers, whatever number of ranks there is."""
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
                    beat=context.beat,
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
    """What is measured of episodes, at least one, by name."""
    solved = sum(episode.success for episode in episodes)
    low, high = wilson_interval(solved, len(episodes))
    length = sum(episode.length for episode in episodes) / len(episodes)
    return dict(zip(SUCCESS_METRICS, (solved / len(episodes), low, high, length), strict=True))


def _add_lines(file: Path, step: int, episodes: Sequence[Episode]) -> None:
    """Add the episodes of a step, in place of what an interrupted run has written of it and of later ones."""
    try:
        lines = read_text(file).splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        lines = []
    kept = [line for line in lines if _step_of(line) < step]
    kept += [json.dumps({"step": step, **episode.to_record()}) for episode in episodes]
    write_atomically(file, "".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    """Which step a line is of; one that is no record is not kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
