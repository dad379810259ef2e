"""PyTorch's optimizers without the compiler, which their methods import only to be left alone by it.

`torch.optim.Optimizer` wraps its methods so that `torch.compile` does not look into them, and for that imports
`torch._dynamo`, with sympy: as long as importing torch itself, though nothing is compiled. What is wrapped is found by
`inspect.unwrap`; where torch wraps nothing, these classes are torch's own. A compiled model imports it anyway.
"""

import inspect
from typing import Any

import torch
from torch import optim

_unwrap: Any = inspect.unwrap


class EagerOptimizer(optim.Optimizer):
    """A `torch.optim.Optimizer` whose own methods import no compiler."""

    add_param_group = _unwrap(optim.Optimizer.add_param_group)
    load_state_dict = _unwrap(optim.Optimizer.load_state_dict)
    state_dict = _unwrap(optim.Optimizer.state_dict)
    zero_grad = _unwrap(optim.Optimizer.zero_grad)


def _eager_step(kind: type[optim.Optimizer]) -> Any:
    """The step of a kind of optimizer, which is not differentiated."""
    return torch.no_grad()(_unwrap(kind.step))


class AdamW(EagerOptimizer, optim.AdamW):
    """`torch.optim.AdamW`, bit for bit."""

    step = _eager_step(optim.AdamW)


class Adam(EagerOptimizer, optim.Adam):
    """`torch.optim.Adam`, bit for bit."""

    step = _eager_step(optim.Adam)


class SGD(EagerOptimizer, optim.SGD):
    """`torch.optim.SGD`, bit for bit."""

    step = _eager_step(optim.SGD)
