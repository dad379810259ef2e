"""Measuring the model on held-out data, and showing what it has learnt."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from foundry.config.metrics import declared_metrics, val_metric_name
from foundry.data.loader import held_out_batches
from foundry.data.splits import DataSplits
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.run_dir.files import make_folder
from foundry.training.metric_sums import add_metrics, reduce_sums
from foundry.training.protocols import GenerativeObjective, LossSum, Mean, Objective
from foundry.training.step import to_device

_log = logging.getLogger(__name__)

_LOSS = "loss"


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
            rank=self.world.dp_rank,
            world_size=self.world.dp_size,
            max_samples=self.max_samples,
        )
        was_training = self.model.training
        self.model.eval()
        device, count = self.world.device, 0
        loss, metrics = torch.zeros((), dtype=torch.float64, device=device), dict[str, Mean]()
        for microbatch in batches:
            beat()
            num_valid = self.objective.num_valid(microbatch)
            count += num_valid
            with self.precision.autocast(device):
                part = self.objective.loss(self.model, to_device(microbatch, device))
            loss += part.loss
            add_metrics(metrics, {name: Mean(m.sum.double(), m.count) for name, m in part.metrics.items()}, num_valid)
        self.model.train(was_training)
        # The loss and its count are one metric of several, reduced with the others; none of them replaces it.
        names = declared_metrics(self.objective)
        sums = LossSum(loss, {**metrics, _LOSS: Mean(loss, count)})
        total = reduce_sums(sums, None if names is None else dict.fromkeys((_LOSS, *names)), self.world)
        means = {val_metric_name(name): mean.item() for name, mean in total.metrics.items()}
        return {name: value for name, value in means.items() if value is not None}

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
