"""Defects for `Rehearsals(before=...)`: each is put into the process of a rehearsal, which should find it."""

import torch
import torch.distributed as dist

from foundry.core.protocols import LossSum
from foundry.objectives.next_token import NextToken
from foundry.training.step import TrainStep

kept = []


def read_the_loss():
    """An objective reads its loss in each microbatch."""
    _change_loss(lambda part: part if part.loss.item() < 1e9 else None)


def use_a_host_tensor():
    """An objective weighs its loss with numbers in host memory."""
    _change_loss(lambda part: LossSum((part.loss[None] * torch.ones(3)).sum(), part.metrics))


def gather_once_more():
    """A step gathers something that no strategy counts."""
    step = TrainStep.__call__

    def gathering(self, window, lr, number, **options):
        part = torch.ones(16, device=self._world.device)
        dist.all_gather_into_tensor(part.new_empty(16 * self._world.world_size), part)
        return step(self, window, lr, number, **options)

    TrainStep.__call__ = gathering


def keep_a_whole_model():
    """A step makes a tensor of the size of the whole model, and keeps it."""
    step = TrainStep.__call__

    def keeping(self, window, lr, number, **options):
        num_weights = sum(parameter.numel() for parameter in self._parameters)
        kept.append(torch.empty(num_weights, device=self._world.device))
        return step(self, window, lr, number, **options)

    TrainStep.__call__ = keeping


def _change_loss(change):
    loss = NextToken.loss
    NextToken.loss = lambda self, model, microbatch: change(loss(self, model, microbatch))
