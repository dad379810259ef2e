"""Training for a few steps at chosen learning rates, without evaluations, checkpoints and records."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from foundry.config.record.frozen import hash_config
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Objective, RunContext, Window, scheduled_momentum
from foundry.data.loader import explain_worker_deaths
from foundry.engine.assembly import build_trainer
from foundry.parallel.determinism import deterministic
from foundry.parallel.precision import PrecisionPolicy, fp32_arithmetic
from foundry.parallel.process_group import World, process_group
from foundry.parts.data import build_data
from foundry.parts.judge import build_judge
from foundry.parts.objective import build_objective
from foundry.training.guards import LossSpike, NonFiniteError, PersistentSpikeError
from foundry.training.memory_error import explain_memory_errors
from foundry.training.trainer import Trainer


@dataclass(frozen=True)
class ShortTraining:
    """A run that a caller trains step by step.

    Attributes:
        world: process group of the run.
        precision: precision policy of the run.
        trainer: the parts of the run; its schedule of the learning rate is not used.
    """

    world: World
    precision: PrecisionPolicy
    trainer: Trainer

    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        return self.trainer.step.model

    @property
    def objective(self) -> Objective:
        """The loss."""
        return self.trainer.step.objective

    def next_window(self) -> Window:
        """Return this rank's microbatches of the next global batch."""
        return self.trainer.source.next_window()

    def take_step(self, window: Window, rate: float, step: int) -> float | None:
        """Update the weights once and return the loss before the update; None if a run would end or roll back here.

        Args:
            window: result of `next_window`.
            rate: learning rate.
            step: number of the step, counted from 1.
        """
        trainer = self.trainer
        trainer.watchdog.heartbeat(step, "training")
        samples_before = trainer.progress.samples
        trainer.progress.advance(window.num_samples, window.num_tokens)
        decay = trainer.schedule.weight_decay(samples_before, trainer.progress.samples)
        momentum = scheduled_momentum(trainer.schedule, samples_before, trainer.progress.samples)
        try:
            loss = float(trainer.step(window, rate, step, weight_decay=decay, momentum=momentum).loss.item())
        except (NonFiniteError, LossSpike, PersistentSpikeError):
            return None
        trainer.watchdog.started()
        return loss


@contextmanager
def short_training(config: Config, run_dir: Path, *, generation: str) -> Iterator[ShortTraining]:
    """Build the parts of a run as one rank of it; all ranks call this.

    Args:
        config: configuration of the run; its learning rates, budget, checkpoints and evaluations are not used.
        run_dir: directory without a run.
        generation: reason why an objective that trains on completions is refused, which completes "NAME ...".

    Raises:
        ConfigError: the objective trains on completions, or a part cannot be built.
    """
    with (
        deterministic(config.hparams.deterministic),
        fp32_arithmetic(tf32=config.precision.tf32),
        process_group(config.distributed, config.device.kind) as world,
        ExitStack() as stack,
        explain_worker_deaths(),
        explain_memory_errors(world.device, world.rank),
    ):
        data = build_data(config)
        objective = build_objective(config.objective, config.peft, world, data.tokenizer)
        if objective.makes_samples:
            raise ConfigError(Violation("objective", f"{type(objective).__name__} {generation}"))
        if (judge := build_judge(config.environment)) is not None:
            stack.enter_context(closing(judge))
        run = RunContext(
            config=config,
            config_hash=hash_config(config),
            data=data,
            judge=judge,
            world=world,
            precision=PrecisionPolicy.from_config(config.precision, world.device),
            run_dir=run_dir,
        )
        trainer, _ = build_trainer(run)
        stack.callback(trainer.evaluation.close)
        with trainer.watchdog:
            yield ShortTraining(world, run.precision, trainer)
