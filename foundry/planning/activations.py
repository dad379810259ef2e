"""What a forward pass keeps for the backward pass, counted on fake tensors."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foundry.models.fsdp_block import find_blocks
from foundry.parallel.checkpointing import is_saved
from foundry.training.protocols import Microbatch, Objective

_Storages = dict[int, torch.UntypedStorage]


def activation_bytes(
    objective: Objective,
    model: nn.Module,
    microbatch: Microbatch,
    *,
    mode: FakeTensorMode,
    autocast: AbstractContextManager[Any],
    grad_checkpointing: bool,
    selective: bool = False,
) -> int:
    """Bytes that autograd saves in the forward pass of one microbatch, parameters and buffers left out.

    With `grad_checkpointing`: what lies outside of blocks, what goes into them or is kept of them, the largest block,
    recomputed, and the matrices of the blocks as autocast rounds them: it caches them until the window ends.

    Args:
        objective: whose loss is computed.
        model: of fake tensors; hooks stay on its blocks.
        microbatch: real tensors.
        mode: of the model's tensors.
        autocast: around the forward pass.
        grad_checkpointing: count as if each block were recomputed in the backward pass.
        selective: with that, count what is kept of each block instead.
    """
    saved = _Saved(model)
    kept_outputs = _KeptOutputs(saved) if grad_checkpointing and selective else nullcontext()
    # Outside of the mode: an objective may read `position`, and transformers looks at positions that it makes itself. A
    # model's own constants are real, then, and as small as in training.
    # Contiguous, since one sample may stand for all of a microbatch.
    fakes = {name: t if name == "position" else mode.from_tensor(t).contiguous() for name, t in microbatch.items()}
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor), autocast, kept_outputs:
        objective.loss(model, fakes)
    if not grad_checkpointing:
        return _size(saved.outside | _union(saved.inside))
    kept = saved.outside | saved.inputs | saved.kept
    recomputed = [_size({k: s for k, s in block.items() if k not in kept}) for block in saved.inside]
    beyond_rounded = [size - rounded for size, rounded in zip(recomputed, saved.rounded_bytes, strict=True)]
    return _size(kept) + max(beyond_rounded, default=0) + sum(saved.rounded_bytes)


class _Saved:
    """Storages that autograd saves, by the outermost block that computes them."""

    def __init__(self, model: nn.Module) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._ignored = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in held}
        self.outside: _Storages = {}
        self.inputs: _Storages = {}
        self.kept: _Storages = {}
        self.inside: list[_Storages] = []
        self.rounded_bytes: list[int] = []
        self._current, self._depth = self.outside, 0
        for block in find_blocks(model):
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave)

    def pack(self, tensor: Tensor) -> Tensor:
        """The hook of `saved_tensors_hooks`."""
        self._add(tensor, self._current)
        return tensor

    def keep(self, output: Any) -> None:
        """Count an output of an operation in a block, whether autograd saves it or not."""
        if self._depth > 0:
            for value in tree_leaves(output):
                if isinstance(value, Tensor):
                    self._add(value, self.kept)

    def _add(self, tensor: Tensor, storages: _Storages) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            storages[storage._cdata] = storage  # kept, so that its address is not used again

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
        wide = [p for p in block.parameters() if p.ndim > 1 and p.dtype is torch.float32 and p.requires_grad]
        self.rounded_bytes.append(is_amp * sum(p.numel() for p in wide) * torch.get_autocast_dtype("cpu").itemsize)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._current = self.outside


class _KeptOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the outputs that selective checkpointing keeps."""

    def __init__(self, saved: _Saved) -> None:
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
