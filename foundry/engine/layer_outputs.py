"""Mean absolute outputs of a model's layers for a fixed microbatch, and their change since the first measurement."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry.core.protocols import Microbatch
from foundry.engine.short_training import ShortTraining
from foundry.models.fsdp_block import find_blocks
from foundry.training.step import to_device

EMBEDDING, OUTPUT = "embedding", "output"
_MOST_VALUES = 2**22
"""Maximum number of values of an output that are kept and compared."""


@dataclass(frozen=True)
class Activity:
    """Mean absolute value of a layer's output, and mean absolute value of its change since the first measurement."""

    size: float
    change: float


class LayerOutputs:
    """Measures the input of the first block (`embedding`), the output of each block, and the output of the model.

    The output of a language model are its logits. The forward pass has the arguments that the objective passes to the
    model for the microbatch. Dropout is off.

    Args:
        training: the run; its model has blocks and is not sharded.
        microbatch: samples to measure with.
    """

    def __init__(self, training: ShortTraining, microbatch: Microbatch) -> None:
        self._training, self._model = training, training.model
        self._blocks = list(find_blocks(self._model))
        self._arguments = self._find_arguments(to_device(microbatch, training.world.device))
        self._first: dict[str, Tensor] | None = None

    def measure(self) -> dict[str, Activity]:
        """Return the activity of each layer with the present weights."""
        outputs = self._forward()
        if self._first is None:
            self._first = outputs
        first = self._first
        return {
            name: Activity(output.abs().mean().item(), (output - first[name]).abs().mean().item())
            for name, output in outputs.items()
        }

    @torch.no_grad()
    def _find_arguments(self, microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the model's forward pass in the loss of a microbatch."""
        calls = list[tuple[tuple[Any, ...], dict[str, Any]]]()

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))

        handle = self._model.register_forward_pre_hook(record, with_kwargs=True)
        try:
            with self._training.precision.autocast(self._training.world.device):
                self._training.objective.loss(self._model, microbatch)
        finally:
            handle.remove()
        args, kwargs = calls[0]
        parameters = inspect.signature(self._model.forward).parameters
        if "return_logits" not in parameters:
            return args, kwargs
        names = dict(zip(parameters, args, strict=False)) | kwargs
        omitted = ("targets", "token_loss", "read", "per_token", "dropout_keys")
        return (), {**{name: value for name, value in names.items() if name not in omitted}, "return_logits": True}

    @torch.no_grad()
    def _forward(self) -> dict[str, Tensor]:
        """Return the output of each layer, at most `_MOST_VALUES` values each, in float32 on the device."""
        outputs = dict[str, Tensor]()

        def record_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            outputs[EMBEDDING] = _values(args[0])

        def record_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            outputs[f"block {len(outputs)}"] = _values(output)

        handles = [self._blocks[0].register_forward_pre_hook(record_input)]
        handles += [block.register_forward_hook(record_output) for block in self._blocks]
        self._model.eval()
        try:
            with self._training.precision.autocast(self._training.world.device):
                args, kwargs = self._arguments
                answer = self._model(*args, **kwargs)
        finally:
            self._model.train()
            for handle in handles:
                handle.remove()
        return outputs | {OUTPUT: _values(answer if isinstance(answer, Tensor) else answer.logits)}


def _values(output: Tensor) -> Tensor:
    return output.flatten()[:_MOST_VALUES].float().clone()
