"""Defects for `Rehearsals(before=...)`: functions that inject a defect into a rehearsal, which should detect it."""

import torch
import torch.distributed as dist

from foundry.core.protocols import LossSum
from foundry.objectives.next_token import NextToken
from foundry.training.step import TrainStep

tensors = []


def read_the_loss():
    """Make the objective read its loss on the host in each microbatch."""
    _change_loss(lambda part: part if part.loss.item() < 1e9 else None)


def use_a_host_tensor():
    """Make the objective multiply its loss by a tensor in host memory."""
    _change_loss(lambda part: LossSum((part.loss[None] * torch.ones(3)).sum(), part.metrics))


def gather_once_more():
    """Add an all-gather to each step that no strategy accounts for."""
    step = TrainStep.__call__

    def gathering(self, window, lr, number, **options):
        part = torch.ones(16, device=self._world.device)
        dist.all_gather_into_tensor(part.new_empty(16 * self._world.world_size), part)
        return step(self, window, lr, number, **options)

    TrainStep.__call__ = gathering


def keep_a_whole_model():
    """Make each step allocate and retain a tensor of the size of the unsharded model."""
    step = TrainStep.__call__

    def keeping(self, window, lr, number, **options):
        num_weights = sum(parameter.numel() for parameter in self._parameters)
        tensors.append(torch.empty(num_weights, device=self._world.device))
        return step(self, window, lr, number, **options)

    TrainStep.__call__ = keeping


def _change_loss(change):
    loss = NextToken.loss
    NextToken.loss = lambda self, model, microbatch: change(loss(self, model, microbatch))
