"""Memory of the optimizers, measured in steps on fake tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foundry.config.schemas.root import Config
from foundry.core.errors import format_reason
from foundry.optim.adamw_cautious import CautiousAdamW
from foundry.parts.optimization import build_optimizers
from foundry.planning.layout import num_bytes
from foundry.planning.live_bytes import LiveBytes


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of the optimizers if each parameter is whole.

    Attributes:
        state: bytes of each parameter's state, without scalars.
        temporary: bytes that a step allocates and frees once the state exists.
        note: reason why the bytes are unknown; None if they are known.
    """

    state: Mapping[Tensor, int]
    temporary: int
    note: str | None = None


def measure_optimizers(config: Config, model: nn.Module) -> OptimizerMemory:
    """Measure the optimizers' memory in two steps on fake tensors; the model has gradients afterwards."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    state: dict[Tensor, int] = {}
    temporary = 0
    optimizers = build_optimizers(config, model)
    try:
        for optimizer in optimizers:
            fused = [group for group in optimizer.param_groups if group.get("fused")]
            for group in fused:
                # Without fused kernels the state is the same; some fused kernels do not support fake tensors.
                group["fused"] = False
            optimizer.step()
            for tensor, parameter_state in optimizer.state.items():
                tensors = [value for value in parameter_state.values() if isinstance(value, Tensor) and value.ndim > 0]
                state[tensor] = state.get(tensor, 0) + sum(map(num_bytes, tensors))
            if not fused or isinstance(optimizer, CautiousAdamW):  # fused kernels allocate nothing; the decay does
                live = LiveBytes()
                with live:
                    optimizer.step()
                temporary = max(temporary, live.peak)
    except Exception as error:  # a user's optimizer may fail in any way on fake tensors
        return OptimizerMemory({}, 0, f"the optimizers cannot step on fake tensors ({format_reason(error)})")
    return OptimizerMemory(state, temporary)
