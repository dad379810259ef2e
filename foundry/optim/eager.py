"""PyTorch's optimizers without the import of torch's compiler.

`torch.optim.Optimizer` wraps its methods to exclude them from `torch.compile`. To do so it imports `torch._dynamo` and
sympy, which takes as long as importing torch itself even if nothing is compiled. The classes of this module use the
original methods, found with `inspect.unwrap`; in a version of torch that wraps nothing they equal torch's classes. A
compiled model imports the compiler anyway.
"""

import inspect
from typing import Any

import torch
from torch import optim

_unwrap: Any = inspect.unwrap


class EagerOptimizer(optim.Optimizer):
    """A `torch.optim.Optimizer` whose base methods do not import the compiler."""

    add_param_group = _unwrap(optim.Optimizer.add_param_group)
    load_state_dict = _unwrap(optim.Optimizer.load_state_dict)
    state_dict = _unwrap(optim.Optimizer.state_dict)
    zero_grad = _unwrap(optim.Optimizer.zero_grad)


def _eager_step(kind: type[optim.Optimizer]) -> Any:
    """Return the original step of an optimizer class, run without gradients."""
    return torch.no_grad()(_unwrap(kind.step))


class AdamW(EagerOptimizer, optim.AdamW):
    """`torch.optim.AdamW`, bit for bit.

    Subclasses override `update`, since torch adds its hooks to the `step` of each class that has an instance.
    """

    update = _eager_step(optim.AdamW)

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have gradients; return the loss of `closure`, if there is one."""
        return self.update(closure)


class Adam(EagerOptimizer, optim.Adam):
    """`torch.optim.Adam`, bit for bit."""

    step = _eager_step(optim.Adam)


class SGD(EagerOptimizer, optim.SGD):
    """`torch.optim.SGD`, bit for bit."""

    step = _eager_step(optim.SGD)
