"""Which modules are sharded, checkpointed and compiled on their own."""

from collections.abc import Iterator

from torch import nn

from foundry.core.model_hooks import hook


class FSDPBlock(nn.Module):
    """Marks a repeating block, such as a transformer layer. A pure marker: it adds no behaviour.

    A model whose blocks cannot inherit from it says their types in `get_fsdp_block_types()`.
    """


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model, inner before outer.

    A block is an `FSDPBlock`, or an instance of a type that some module's `get_fsdp_block_types()` names; that
    method is asked of every nested module, and speaks for the modules below it.
    """
    yield from _blocks_below(model, ())


def _blocks_below(module: nn.Module, types: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    ask = hook(module, "get_fsdp_block_types")
    inner = types + tuple(ask()) if ask is not None else types
    for child in module.children():
        yield from _blocks_below(child, inner)
        if isinstance(child, (FSDPBlock, *inner)):
            yield child
