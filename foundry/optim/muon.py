"""Muon for matrices that may be sharded.

`torch.optim.Muon` multiplies the shards of a matrix through DTensor, in bfloat16, where partial products are rounded
before they are summed: in three steps two ranks are 1e-3 away from one. Here each update is gathered and orthogonalised
whole, so any number of ranks takes the same one; momentum and weights stay sharded.

Equal gradients give equal updates in either arithmetic. Gradients that differ in the last bit, as sums in another order
do, give updates that differ by at most 3.4445^5 = 485 times as much in fp32. In bfloat16 a difference may also change
which way a number is rounded, and weak directions are made of such roundings.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from foundry.optim.eager import EagerOptimizer
from foundry.training.sharded import is_sharded, local_part

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(EagerOptimizer):
    """Momentum, orthogonalised (Jordan et al., 2024); in bfloat16 one process equals `torch.optim.Muon` bit for bit.

    The update is scaled to the root mean square of AdamW's (Liu et al., 2025), so that both use the same rate, and
    weight decay is decoupled. Every rank orthogonalises every matrix.

    Args:
        params: matrices, or groups of them; DTensors may be sharded in any way.
        lr: learning rate.
        momentum: decay of the velocity.
        nesterov: look ahead by one step of momentum.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: what they are computed in: float32 or bfloat16.
        weight_decay: decoupled, times the rate.
    """

    # As fused optimizers do, it leaves the update out where `found_inf` is 1, without reading the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        ns_dtype: torch.dtype,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "ns_steps": ns_steps, "ns_dtype": ns_dtype})
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            assert all(p.ndim == 2 for p in group["params"]), "Muon is for matrices"

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient."""
        assert closure is None, "the loss is evaluated once a step"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)
        return None

    def _update(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        assert matrix.grad is not None
        weight, grad, velocity = local_part(matrix), local_part(matrix.grad), local_part(state["momentum_buffer"])
        moved = velocity.lerp(grad, 1 - group["momentum"])
        ahead = grad.lerp(moved, group["momentum"]) if group["nesterov"] else moved
        iteration = {"num_steps": group["ns_steps"], "dtype": group["ns_dtype"]}
        direction = _of_whole(ahead, matrix, lambda whole: orthogonalise(whole, **iteration))
        rate = group["lr"] * 0.2 * math.sqrt(max(matrix.shape))
        # Of bf16 weights too: `add_` rounds bf16 otherwise at the end of a tensor, and a shard ends elsewhere.
        updated = (weight.float() * (1 - group["lr"] * group["weight_decay"])).add_(direction, alpha=-rate)
        if self.found_inf is not None:
            moved = torch.where(self.found_inf > 0, velocity, moved)
            updated = torch.where(self.found_inf > 0, weight, updated)
        velocity.copy_(moved)
        weight.copy_(updated)


def orthogonalise(matrix: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end up between about 0.7 and 1.2.

    A quintic Newton-Schulz iteration with the coefficients of https://kellerjordan.github.io/posts/muon.

    Args:
        matrix: (rows, columns) floating point.
        num_steps: iterations.
        dtype: of the iteration.

    Returns:
        (rows, columns) of `dtype`.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)  # the iteration converges for singular values of at most about 1
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _of_whole(local: Tensor, like: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part of `function(whole)`, where `local` is its part of a whole laid out as `like` is."""
    if not is_sharded(like):
        return function(local)
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = like.device_mesh, like.placements
    sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    result = DTensor.from_local(function(sharded.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return result.redistribute(placements=placements).to_local().to(local.device)
