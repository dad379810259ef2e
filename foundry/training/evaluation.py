"""Measuring the model on held-out data, and showing what it has learnt."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from foundry.config.metrics import LOSS, val_metric_name
from foundry.data.loader import held_out_batches
from foundry.data.splits import DataSplits
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.run_dir.files import make_folder
from foundry.training.protocols import GenerativeObjective, Objective
from foundry.training.step import to_device

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates the model as it is; every rank calls each method together with the others.

    Attributes:
        model: the model as it was wrapped.
        objective: gives the loss and, if it can, draws samples.
        data: its held-out samples are measured.
        precision: the arithmetic of the run.
        world: this rank and the others.
        per_gpu_batch_size: samples per forward pass.
        max_samples: held-out samples, the first ones; None: all.
        samples_dir: where rank 0 writes what was drawn; None: nothing is drawn.
    """

    model: nn.Module
    objective: Objective
    data: DataSplits
    precision: PrecisionPolicy
    world: World
    per_gpu_batch_size: int
    max_samples: int | None
    samples_dir: Path | None

    @torch.no_grad()
    def measure(self, beat: Callable[[], None]) -> dict[str, float]:
        """The means over all valid held-out items of all ranks, by name as in metrics.jsonl: `val_loss`, `val_…`.

        Args:
            beat: called before every forward pass, to tell a watchdog.
        """
        batches = held_out_batches(
            self.data.validation,
            per_gpu_batch_size=self.per_gpu_batch_size,
            rank=self.world.rank,
            world_size=self.world.world_size,
            max_samples=self.max_samples,
        )
        was_training = self.model.training
        self.model.eval()
        count, sums = 0, dict[str, Tensor]()
        for microbatch in batches:
            beat()
            count += self.objective.num_valid(microbatch)
            with self.precision.autocast(self.world.device):
                part = self.objective.loss(self.model, to_device(microbatch, self.world.device))
            own = {val_metric_name(name): value for name, value in part.metrics.items()}
            named = {LOSS: part.loss} | own | {LOSS: part.loss}  # no metric of an objective replaces the loss
            for name, value in named.items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
        self.model.train(was_training)
        counted = torch.tensor(float(count), dtype=torch.float64, device=self.world.device)
        total = self.world.all_reduce_sum(torch.stack([counted, *sums.values()])).tolist()
        return {name: value / max(total[0], 1.0) for name, value in zip(sums, total[1:], strict=True)}

    def move(self, run_dir: Path) -> None:
        """Write what is drawn from now on into another run directory."""
        self.samples_dir = None if self.samples_dir is None else run_dir / self.samples_dir.name

    def generate(self, step: int) -> Path | None:
        """Draw samples after `step` steps; rank 0 keeps them as samples_<step>, and the newest as samples."""
        if self.samples_dir is None or not isinstance(self.objective, GenerativeObjective):
            return None
        with self.precision.autocast(self.world.device):
            samples = self.objective.generate(self.model, self.data, self.world.device)
        if not self.world.is_main:
            return None
        try:
            self.samples_dir.mkdir(exist_ok=True)  # not its parents: a run directory that is gone is made elsewhere
            make_folder(self.samples_dir)
            samples.save(self.samples_dir / f"samples_{step:08d}")
            return samples.save(self.samples_dir / "samples")
        except OSError as error:
            _log.warning("no samples are written: %s (the run goes on)", error)
            return None
