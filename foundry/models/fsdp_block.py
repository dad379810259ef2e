"""Marker of a model's repeating blocks, which are sharded, checkpointed and compiled one by one."""

from collections.abc import Iterator

from torch import nn

from foundry.core.model_hooks import hook


class FSDPBlock(nn.Module):
    """Base class that marks a repeating block, such as a transformer layer. It adds no behavior.

    A model whose blocks cannot inherit from this class returns the types of its blocks from `get_fsdp_block_types()`.
    """


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model; a block within another block comes before it.

    A block is an `FSDPBlock`, or an instance of a type that the `get_fsdp_block_types()` method of an enclosing module
    returns. The method is looked up on every module, and its types apply to the modules below it.
    """
    yield from _blocks_below(model, ())


def _blocks_below(module: nn.Module, types: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    get_types = hook(module, "get_fsdp_block_types")
    inner = types + tuple(get_types()) if get_types is not None else types
    for child in module.children():
        yield from _blocks_below(child, inner)
        if isinstance(child, (FSDPBlock, *inner)):
            yield child
