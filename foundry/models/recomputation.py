"""Recomputation of a function in the backward pass, without importing torch's compiler.

`torch.utils.checkpoint.checkpoint` imports the compiler to exclude itself from compiled graphs, which takes longer than
importing torch.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def recomputed(function: Callable[..., Any], tensor: Tensor, *arguments: Any) -> Any:
    """Call `function` without keeping the tensors that its backward pass needs; that pass calls the function again.

    Results and gradients are equal to those without recomputation. The second call has the autocast settings of the
    first. The function must compute the same values in both calls, and must not change its arguments. The gradients
    cannot be differentiated again.

    Args:
        function: the function, which draws no random numbers.
        tensor: first argument of the function, on the device of the computation.
        arguments: further arguments of the function.
    """
    if not torch.is_grad_enabled():
        return function(tensor, *arguments)
    saved = _Recomputation(function, tensor, *arguments)
    with saved_tensors_hooks(saved.count, saved.restore):
        return function(tensor, *arguments)


class _Recomputation:
    """Tensors that a call saves for its backward pass; takes the same arguments as `recomputed`."""

    def __init__(self, function: Callable[..., Any], tensor: Tensor, *arguments: Any) -> None:
        self._function, self._arguments = function, (tensor, *arguments)
        self._autocasts: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in sorted({"cpu", tensor.device.type})
        ]
        self._num_saved = 0
        self._tensors: dict[int, Tensor] = {}

    def count(self, tensor: Tensor) -> int:
        """Return the number of a tensor that the first call would have saved."""
        self._num_saved += 1
        return self._num_saved - 1

    def restore(self, number: int) -> Tensor:
        """Return a saved tensor by its number, once for each call of the function."""
        if number not in self._tensors:
            self._call_again()
        return self._tensors.pop(number)

    def _call_again(self) -> None:
        tensors = list[Tensor]()

        def keep(tensor: Tensor) -> None:
            tensors.append(tensor.detach())

        with ExitStack() as stack:
            for settings in self._autocasts:
                stack.enter_context(torch.autocast(**settings))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, _restore_nothing))
            self._function(*self._arguments)
        assert len(tensors) == self._num_saved, f"{self._function} computes something else in its second call"
        self._tensors = dict(enumerate(tensors))


def _restore_nothing(nothing: None) -> Tensor:
    """Fail: nothing computes the gradient of a second call."""
    raise AssertionError("the second call is not differentiated")
