"""Exponential moving average (EMA) of the weights, sharded like the weights."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from foundry.core.sharded import local_part
from foundry.core.state_values import read_count


class WeightAverage:
    """Moving average of a model's trainable parameters: average = d * average + (1 - d) * weights.

    The decay d of update t is min(decay, (1 + t) / (10 + t)), as in TensorFlow's ExponentialMovingAverage, so that a
    short run does not average in its initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._updates: int | Tensor = 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Always in float32: in bfloat16 an update by a factor of 1 - decay would be rounded away.
        self.average = {name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, skipped: Tensor | bool = False) -> None:
        """Update the average with the weights after an optimizer step.

        Args:
            skipped: whether the optimizer step was skipped, so that the average must not change either; a () bool
                tensor if this value is only on the device.
        """
        if isinstance(skipped, Tensor):
            self._update_on_device(skipped)
            return
        if skipped:
            return
        updates = self._updates = int(self._updates) + 1
        decay = min(self._decay, (1 + updates) / (10 + updates))
        weights = [weight.float() for weight in _local(self._parameters.values())]
        torch._foreach_lerp_(_local(self.average.values()), weights, 1 - decay)

    def _update_on_device(self, skipped: Tensor) -> None:
        """Update without a device sync: a skipped step interpolates by 0. Needs one kernel for each tensor."""
        is_update = (~skipped).double()
        self._updates = self._updates + is_update
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        interpolation = ((1 - decay) * is_update).float()
        for average, weight in zip(_local(self.average.values()), _local(self._parameters.values()), strict=True):
            average.lerp_(weight.float(), interpolation)

    def state_dict(self) -> dict[str, int]:
        """Return the number of updates as plain JSON; the averages are tensors, which are saved with the weights."""
        return {"updates": int(self._updates)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the number of updates from a `state_dict()`."""
        self._updates = read_count(state, "updates")

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the averaged weights during the body, and restore its own weights afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(_local(self.average.values()), _local(self._parameters.values()), strict=True):
            previous = average.clone()
            average.copy_(weight)
            weight.copy_(previous)


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each tensor."""
    return [local_part(t).detach() for t in tensors]
