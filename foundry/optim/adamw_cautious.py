"""AdamW with cautious weight decay."""

from typing import Any

import torch
from torch import Tensor

from foundry.core.sharded import local_part
from foundry.optim.adamw_bf16 import Bf16AdamW
from foundry.optim.eager import AdamW
from foundry.optim.muon import chunks
from foundry.optim.owners import join, unflatten


class CautiousAdamW(AdamW):
    """AdamW that decays only the elements that its update moves towards zero (Chen et al., 2025, arXiv 2510.12402).

    With learning rate l, weight decay d and the update u that Adam subtracts, an element w becomes w (1 - l d) - l u if
    u w >= 0, and w - l u otherwise. The sign of u is that of the new first moment. A step decays the weights first, and
    torch's kernel then updates them without weight decay. The arguments are as for `torch.optim.AdamW`; `amsgrad`,
    `maximize`, `capturable` and `differentiable` must be false.
    """

    @torch.no_grad()
    def update(self, closure: Any = None) -> Any:
        """Update all parameters that have gradients."""
        assert closure is None, "the loss is evaluated once a step"
        weight_decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                if group["weight_decay"] != 0:
                    self._decay(group)
                group["weight_decay"] = 0.0
            super().update()
        finally:
            for group, weight_decay in zip(self.param_groups, weight_decays, strict=True):
                group["weight_decay"] = weight_decay
        return None

    def _decay(self, group: dict[str, Any]) -> None:
        """Decay the weights of a parameter group, in fp32, unless the update is skipped because `found_inf` is 1."""
        found_inf, keep = getattr(self, "found_inf", None), 1 - group["lr"] * group["weight_decay"]
        members = [(parameter, group) for parameter in group["params"] if parameter.grad is not None]
        for numbers in chunks(members, lambda parameter, _: (parameter.dtype, self._moment(parameter) is None)):
            parameters = [members[number][0] for number in numbers]
            weights = [local_part(parameter) for parameter in parameters]
            direction = join([local_part(p.grad) for p in parameters if p.grad is not None]).float()
            moments = [moment for p in parameters if (moment := self._moment(p)) is not None]
            if moments:  # before the first step the moments are 0
                direction = join(moments).float().lerp(direction, 1 - group["betas"][0])
            weight = join(weights).float()
            is_decayed = direction * weight >= 0
            if found_inf is not None:
                is_decayed &= found_inf == 0
            decayed = torch.where(is_decayed, weight * keep, weight)
            torch._foreach_copy_(weights, unflatten(decayed, [part.shape for part in weights]))

    def _moment(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's part of the first moment; None before the first step."""
        moment = self.state.get(parameter, {}).get("exp_avg")
        return None if moment is None else local_part(moment)


class CautiousBf16AdamW(CautiousAdamW, Bf16AdamW):
    """`CautiousAdamW` with moments stored in bf16, as in `Bf16AdamW`."""
