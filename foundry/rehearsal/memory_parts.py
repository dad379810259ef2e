"""Assignment of storages to parts of the memory: weights, gradients, or optimizer state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from foundry.core.sharded import is_sharded, local_part
from foundry.rehearsal.memory_ledger import MemoryLedger

OPTIMIZER = ", optimizer"
"""Suffix of the phase name during the step of an optimizer."""


@contextmanager
def assign_parts(ledger: MemoryLedger) -> Iterator[None]:
    """Assign the tensors of a run's model and optimizers to parts of a ledger, with global hooks of torch.

    Each step of an optimizer is a separate phase. A gradient is assigned each time that autograd adds to it, also the
    unsharded gradient of weights that FSDP2 has gathered.
    """
    hooked = set[int]()
    phases = list[str]()  # stack of phases to return to, since the step of an optimizer may call the step of another

    def follow_gradients(module: nn.Module, arguments: Any) -> None:
        for parameter in module.parameters(recurse=False):
            is_leaf = parameter.requires_grad and parameter.is_leaf and not is_sharded(parameter)
            if is_leaf and id(parameter) not in hooked:
                hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(_assign_gradient)  # type: ignore[no-untyped-call]

    def _assign_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.assign(local_part(parameter.grad), "gradients")

    def before_step(optimizer: Optimizer, arguments: Any, options: Any) -> None:
        phases.append(ledger.phase)
        ledger.begin(ledger.phase.removesuffix(OPTIMIZER) + OPTIMIZER)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                ledger.assign(local_part(parameter), "weights")
                _assign_gradient(parameter)

    def after_step(optimizer: Optimizer, arguments: Any, options: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    ledger.assign(local_part(value), "optimizer")
        ledger.begin(phases.pop())

    hooks = [
        register_module_forward_pre_hook(follow_gradients),
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(after_step),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
