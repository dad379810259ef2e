"""Bytes that a forward pass keeps for the backward pass, counted on fake tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foundry.core.planned_device import plan_for
from foundry.core.protocols import Microbatch, Objective
from foundry.models.fsdp_block import find_blocks
from foundry.parallel.checkpointing import is_saved
from foundry.planning.live_bytes import LiveBytes

_Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch's activations, without parameters and buffers.

    Attributes:
        saved: all tensors that the backward pass needs. With checkpointing: tensors outside of blocks, tensors kept
            from blocks, and the largest recomputed block.
        forward_peak: peak of live bytes in the forward pass; for most models it is reached in the loss.
        rounded: matrices of blocks in the type of autocast, which caches them until the window ends; part of `saved`.
        block: activations of the largest block, without its rounded matrices; part of `saved`.
        backward: peak bytes that the backward pass of the loss and of the last block adds to the activations, without
            gradients of parameters.
        recomputes: whether blocks are recomputed in the backward pass.
    """

    saved: int
    forward_peak: int
    rounded: int
    block: int
    backward: int
    recomputes: bool

    def extrapolated(self, double: "Activations", ratio: tuple[int, int]) -> "Activations":
        """Extrapolate to more samples: the bytes are linear in the number of samples.

        Args:
            double: activations of twice as many samples.
            ratio: ratio of the numbers of samples, as numerator and denominator.
        """
        numerator, denominator = ratio
        pairs = zip(astuple(self)[:-1], astuple(double)[:-1], strict=True)
        sizes = [size + (double_size - size) * (numerator - denominator) // denominator for size, double_size in pairs]
        saved, forward_peak, rounded, block, backward = sizes
        return Activations(saved, forward_peak, rounded, block, backward, self.recomputes)


def count_activations(
    objective: Objective,
    model: nn.Module,
    microbatch: Microbatch,
    *,
    mode: FakeTensorMode,
    autocast: AbstractContextManager[Any],
    device_type: str,
    grad_checkpointing: bool,
    selective: bool = False,
) -> Activations:
    """Return the bytes of the tensors that autograd saves for one microbatch, and of temporary tensors.

    Args:
        objective: objective that computes the loss.
        model: model of fake tensors; its blocks keep the hooks of this function.
        microbatch: real tensors.
        mode: fake tensor mode of the model.
        autocast: context of the forward pass.
        device_type: device of the run, "cuda" or "cpu"; it determines how many tokens are projected to logits at a
            time.
        grad_checkpointing: count as if each block were recomputed in the backward pass.
        selective: with `grad_checkpointing`, count the outputs of each block that selective checkpointing keeps.
    """
    # Run outside of the mode: an objective may read the values of `position`, and transformers reads the position ids
    # that it creates. So constants that the model creates are real tensors, as small as in training.
    # Make tensors contiguous, because a microbatch may be one expanded sample.
    fakes = {name: t if name == "position" else mode.from_tensor(t).contiguous() for name, t in microbatch.items()}

    def compute_loss() -> Tensor:
        with plan_for(device_type), autocast:
            return objective.loss(model, fakes).loss

    backward = _backward_bytes(compute_loss, model, device_type)
    saved = _SavedStorages(model)
    kept_outputs = _KeptOutputs(saved) if grad_checkpointing and selective else nullcontext()
    live = _LiveActivations(saved) if grad_checkpointing else LiveBytes()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor)
    with hooks, kept_outputs, live:
        compute_loss()
    rounded = sum(saved.rounded.values())
    kept_storages = saved.outside | saved.inputs | saved.kept
    block_sizes = [_size({k: s for k, s in block.items() if k not in kept_storages}) for block in saved.inside]
    sizes_without_rounded = [size - matrices for size, matrices in zip(block_sizes, saved.rounded_bytes, strict=True)]
    block = max(sizes_without_rounded, default=0)
    return Activations(
        saved=_size(kept_storages) + block + rounded
        if grad_checkpointing
        else _size(saved.outside | _union(saved.inside)),
        forward_peak=live.peak + rounded * grad_checkpointing,
        rounded=rounded,
        block=block,
        backward=backward,
        recomputes=grad_checkpointing,
    )


class _LastBlockReached(Exception):
    """The backward pass has reached the input of the last block."""


def _backward_bytes(compute_loss: Callable[[], Tensor], model: nn.Module, device_type: str) -> int:
    """Return the bytes that the backward pass of the loss and of the last block adds to the saved activations.

    Args:
        compute_loss: the forward pass.
        model: the model; its parameters have no gradients afterwards.
        device_type: device of the run.
    """
    inputs: list[Any] = []

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[:] = [args, kwargs]

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    def stop(_: Tensor) -> None:
        raise _LastBlockReached

    hooks: list[Any] = [block.register_forward_pre_hook(note, with_kwargs=True) for block in find_blocks(model)]
    trainable = [p for p in model.parameters() if p.requires_grad]
    hooks += [p.register_post_accumulate_grad_hook(free) for p in trainable]  # type: ignore[no-untyped-call]
    live = LiveBytes()
    with live:
        loss = compute_loss()
        live.peak = bytes_before = live.current
        for value in tree_leaves(inputs):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(stop)  # type: ignore[no-untyped-call]
        with plan_for(device_type), suppress(_LastBlockReached):
            loss.backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return live.peak - bytes_before


class _SavedStorages:
    """Storages that autograd saves, grouped by the outermost block that computes them."""

    def __init__(self, model: nn.Module) -> None:
        model_tensors = [*model.parameters(), *model.buffers()]
        self._ignored = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in model_tensors}
        self.outside: _Storages = {}
        self.inputs: _Storages = {}
        self.kept: _Storages = {}
        self.inside: list[_Storages] = []
        self.rounded_bytes: list[int] = []
        self.rounded: dict[nn.Module, int] = {}
        self._current, self._depth = self.outside, 0
        for block in find_blocks(model):
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave)

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves (hook of `saved_tensors_hooks`)."""
        self._add(tensor, self._current)
        return tensor

    def keep(self, output: Any) -> None:
        """Count the output of an operation in a block, whether autograd saves it or not."""
        if self._depth > 0:
            for value in tree_leaves(output):
                if isinstance(value, Tensor):
                    self._add(value, self.kept)

    def recomputed(self) -> int:
        """Return the bytes of the storages that blocks have saved so far and that checkpointing would free."""
        kept_storages = self.outside | self.inputs | self.kept
        return _size({k: s for k, s in _union(self.inside).items() if k not in kept_storages})

    @property
    def is_in_block(self) -> bool:
        """Whether a block is computing."""
        return self._depth > 0

    def _add(self, tensor: Tensor, storages: _Storages) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            storages[storage._cdata] = storage  # keep a reference so that the address is not reused

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._current = {}
        self.inside.append(self._current)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._add(value, self.inputs)
        is_amp = torch.is_autocast_enabled("cpu")
        wide_parameters = [p for p in block.parameters() if p.ndim > 1 and p.dtype is torch.float32 and p.requires_grad]
        size = is_amp * sum(p.numel() for p in wide_parameters) * torch.get_autocast_dtype("cpu").itemsize
        self.rounded_bytes.append(size)
        self.rounded[block] = size  # counted once, even if the block is called several times

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._current = self.outside


class _LiveActivations(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts the live storages while no block computes, except the blocks' storages that checkpointing frees."""

    def __init__(self, saved: _SavedStorages) -> None:
        super().__init__()
        self._saved, self._freed, self._counted = saved, 0, 0

    def _note_peak(self) -> None:
        if self._saved.is_in_block:
            return
        if self._counted < len(self._saved.inside):
            self._freed, self._counted = self._saved.recomputed(), len(self._saved.inside)
        self.peak = max(self.peak, self.current - self._freed)


class _KeptOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the outputs that selective checkpointing keeps."""

    def __init__(self, saved: _SavedStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operator(*args, **(kwargs or {}))
        if is_saved(operator):
            self._saved.keep(output)
        return output


def _union(parts: list[_Storages]) -> _Storages:
    return {key: storage for part in parts for key, storage in part.items()}


def _size(storages: _Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())
