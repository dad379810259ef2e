"""AdamW with moments stored in bf16."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from foundry.core.sharded import local_part
from foundry.optim.eager import AdamW

_CHUNK_BYTES = 256 * 2**20
"""Maximum size of the converted moments of a chunk of parameters, unless a single parameter has more."""


class Bf16AdamW(AdamW):
    """AdamW (Loshchilov and Hutter, 2019) with moments rounded to bf16 between steps, which halves their memory.

    A step converts the moments of a chunk of parameters to the dtype of the parameters, updates parameters and moments
    with torch's kernel, and rounds the moments to the nearest bf16 values. DTensors are updated shard by shard. The
    arguments are as for `torch.optim.AdamW`; `amsgrad`, `maximize`, `capturable` and `differentiable` have no effect.
    """

    @torch.no_grad()
    def update(self, closure: Any = None) -> Any:
        """Update all parameters that have gradients."""
        assert closure is None, "the loss is evaluated once a step"
        for group in self.param_groups:
            for chunk in _chunks([parameter for parameter in group["params"] if parameter.grad is not None]):
                self._update_chunk(chunk, group)
        return None

    def _update_chunk(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        weights = [local_part(parameter) for parameter in parameters]
        states = [self._state(parameter, is_fused=bool(group["fused"])) for parameter in parameters]
        state_tensors = [local_part(state[key]) for key in ("exp_avg", "exp_avg_sq") for state in states]
        moments = [torch.empty_like(weight) for weight in weights * 2]
        torch._foreach_copy_(moments, state_tensors)
        adamw(
            weights,
            [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None],
            moments[: len(weights)],
            moments[len(weights) :],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=group["fused"],
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        torch._foreach_copy_(state_tensors, moments)

    def _state(self, parameter: Tensor, *, is_fused: bool) -> dict[str, Tensor]:
        """Return the parameter's moments and step count under torch's names, initialized to zeros."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # The device that torch's kernels expect: the device of the parameter if fused, otherwise the CPU.
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if is_fused else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return state


def _chunks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split parameters into chunks whose converted moments fit into `_CHUNK_BYTES`."""
    chunk, chunk_bytes = list[Tensor](), 0
    for parameter in parameters:
        size = 2 * local_part(parameter).numel() * parameter.element_size()
        if chunk and chunk_bytes + size > _CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(parameter)
        chunk_bytes += size
    if chunk:
        yield chunk
