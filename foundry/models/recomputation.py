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
from torch.utils.checkpoint import get_device_states, set_device_states


def recomputed(function: Callable[..., Any], tensor: Tensor, *arguments: Any) -> Any:
    """Call `function` without keeping the tensors that its backward pass needs; that pass calls the function again.

    Results and gradients are equal to those without recomputation. The second call has the autocast settings and the
    random numbers of the first. The function must not change its arguments. The gradients cannot be differentiated
    again.

    Args:
        function: the function, which may draw random numbers from torch's default generators.
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
        self._device_type = tensor.device.type
        self._rng_state = torch.get_rng_state()
        # As in `torch.utils.checkpoint`: a device that is not initialized, such as a rehearsed one, has no state.
        has_state = getattr(getattr(torch, self._device_type, None), "_initialized", False)
        self._devices, self._device_states = get_device_states(tensor) if has_state else ([], [])
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
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._device_type))
            torch.set_rng_state(self._rng_state)
            set_device_states(self._devices, self._device_states, device_type=self._device_type)
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
