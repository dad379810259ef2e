"""SGD with torch's fused kernel, which here also supports sharded parameters."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from foundry.core.sharded import local_part
from foundry.optim.eager import SGD


class ShardedSGD(SGD):
    """`torch.optim.SGD` whose fused kernel updates DTensors shard by shard.

    Momentum starts at zeros, which gives the same bits as torch's first step, and leaves no momentum uninitialized if
    the first step is skipped. `dampening`, `maximize` and `differentiable` have no effect.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have gradients."""
        assert closure is None, "the loss is evaluated once a step"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            has_momentum = group["momentum"] != 0
            sgd(
                [local_part(p) for p in parameters],
                [local_part(p.grad) for p in parameters if p.grad is not None],
                [local_part(self._momentum(p)) if has_momentum else None for p in parameters],
                foreach=None if group["fused"] else group["foreach"],
                fused=group["fused"],
                found_inf=getattr(self, "found_inf", None),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )
        return None

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Return the momentum buffer of a parameter under torch's name, initialized to zeros."""
        state: dict[str, Tensor] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]
