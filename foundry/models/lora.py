"""Low-rank adapters (Hu et al., 2021): which layers have one, and their weights with it."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from foundry.config.schemas.peft import LoRA
from foundry.core.errors import ConfigError, Violation
from foundry.core.foreign import ForeignData
from foundry.models.fsdp_block import find_blocks

MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "qkv", "query_key_value", "c_attn"),
    "linear_proj": ("o_proj", "out_proj", "dense", "out"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h"),
    "linear_fc2": ("down_proj", "fc2", "dense_4h_to_h"),
}
"""Megatron's names of the linear layers of a block, and what others call them."""

_NO_ALIASES: Mapping[str, Sequence[str]] = {}
_KEY = "peft.target_modules"
_ADAPTER = "default"
_SEED_OFFSET = 0x4C6F5241
"""So that adapters are not drawn with the random numbers of the first weights."""


def match_targets(
    names: Iterable[str], patterns: Iterable[str], aliases: Mapping[str, Sequence[str]] = _NO_ALIASES
) -> list[str]:
    """The full names of the layers that patterns choose, in the order of `names`.

    A pattern is the last part of a dotted name, as it is, or wildcards for all of it: in `*.layers.1.*.q_proj` the
    dots are dots, so that layers 10 to 19 are not meant.

    Args:
        names: dotted names of the layers that can have an adapter.
        patterns: of which one must fit.
        aliases: other names for a last part, such as `linear_qkv` for `q_proj`, `k_proj` and `v_proj`.
    """
    wanted = [name for pattern in patterns for name in _without_aliases(pattern, aliases)]
    return [name for name in names if any(_fits(name, pattern) for pattern in wanted)]


def scaling(alpha: float, rank: int, *, rslora: bool = False) -> float:
    """What the product of the two matrices is multiplied by: alpha / rank, or alpha / √rank (Kalajdzievski, 2023)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def merged(weight: Tensor, a: Tensor, b: Tensor, *, alpha: float, rslora: bool = False) -> Tensor:
    """The matrix of a layer and its adapter in one: weight + scaling x B A, in the dtype of `weight`.

    The sum is made in float32 at least and rounded once: in bfloat16 most of a small adapter would be lost.

    Args:
        weight: (out_features, in_features).
        a: (rank, in_features).
        b: (out_features, rank).
        alpha: scale of the adapter.
        rslora: scale by the root of the rank.
    """
    dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    delta = scaling(alpha, a.shape[0], rslora=rslora) * (b.to(dtype) @ a.to(dtype))
    return (weight.to(dtype) + delta).to(weight.dtype)


def resolve_targets(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The full names of a model's linear layers that patterns choose; Megatron's names are those of layers in blocks.

    Raises:
        ConfigError: a pattern fits no layer, or the head, whose matrix a language model reads without the layer.
    """
    layers = {name: module for name, module in model.named_modules() if is_linear(module)}
    blocks = {module for block in find_blocks(model) for module in block.modules()}
    inner = [name for name, module in layers.items() if module in blocks or not blocks]
    find_head: Callable[[], nn.Module | None] = getattr(model, "output_head", lambda: None)
    head = find_head()
    chosen = set[str]()
    for pattern in patterns:
        found = {*match_targets(layers, [pattern]), *match_targets(inner, [pattern], MEGATRON)}
        if not found:
            known = dict.fromkeys(name.rpartition(".")[2] for name, module in layers.items() if module is not head)
            message = f"has {pattern}, which fits no linear layer of {type(model).__name__}"
            if set(pattern) & set("|+\\^$()") or ".*" in pattern.lstrip("*"):
                message += " (* and ? are wildcards; regular expressions are not known)"
            there = f"there are {', '.join(known)}, in full such as {next(iter(inner), 'none')}"
            raise ConfigError(Violation(_KEY, f"{message}; {there}"))
        if heads := [name for name in found if layers[name] is head]:
            message = f"has {pattern}, which fits {heads[0]}, whose matrix is read without its layer"
            raise ConfigError(Violation(_KEY, f"{message}; name the layers of the blocks, such as *.layers.*_proj"))
        chosen |= found
    return [name for name in layers if name in chosen]


def add_adapters(model: nn.Module, settings: LoRA, seed: int) -> list[str]:
    """Give layers of a model adapters, which change nothing yet, and freeze everything else; in place.

    Args:
        model: not yet wrapped; the adapters are float32, and names `<layer>.weight` become `<layer>.base_layer.weight`.
        settings: of the adapters.
        seed: of their first weights, which depend on nothing else.

    Returns:
        The full names of the layers.

    Raises:
        ConfigError: as `resolve_targets`; or peft cannot add adapters to these layers.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = resolve_targets(model, settings.target_modules)
    config = LoraConfig(
        r=settings.adapter_dim,
        lora_alpha=cast(int, settings.alpha),
        lora_dropout=settings.adapter_dropout or 0.0,
        use_rslora=settings.rslora,
        # A pattern for whole names: those of a list would fit the ends of others, too.
        target_modules="|".join(map(re.escape, names)),
        fan_in_fan_out=not any(isinstance(model.get_submodule(name), nn.Linear) for name in names),
    )
    with torch.random.fork_rng(devices=[]), ForeignData(partial(_refuse, names), torch.OutOfMemoryError, MemoryError):
        torch.manual_seed(seed + _SEED_OFFSET)
        inject_adapter_in_model(config, model, _ADAPTER)
    return names


def _refuse(names: Sequence[str], reason: str) -> ConfigError:
    message = f"chooses {count_by_kind(names)}, to which peft cannot add adapters: {reason}; name other layers"
    return ConfigError(Violation(_KEY, f"{message}, or train all weights with peft=none"))


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have adapters, as peft's `LoraLayer`, by the name that the layer had without."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Have a model, wrapped or not, compute in the body what its base does; what is trained stays trainable.

    peft's `enable_adapters` would change `requires_grad`, after which FSDP2 and optimizers no longer fit the model.
    """
    layers = list(adapted_layers(model).values())
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the adapters of a model, not wrapped, to the weights of their layers, and take them away; in place."""
    for layer in adapted_layers(model).values():
        base, a, b = layer.base_layer, layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
        settings = {"alpha": layer.lora_alpha[_ADAPTER], "rslora": layer.use_rslora[_ADAPTER]}
        weight = base.weight if isinstance(base, nn.Linear) else base.weight.T  # transformers' Conv1D
        weight.copy_(merged(weight, a, b, **settings))
    remove_adapters(model)


def remove_adapters(model: nn.Module) -> None:
    """Leave a model, not wrapped, with the layers that it had before adapters; in place."""
    for name, layer in adapted_layers(model).items():
        model.set_submodule(name, layer.base_layer)
    if hasattr(model, "peft_config"):  # which injection has left
        del model.peft_config


def frozen_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The frozen weights of linear layers in blocks, which autocast rounds whenever it multiplies by them."""
    modules = (module for block in find_blocks(model) for module in block.modules() if is_linear(module))
    weights = (cast(nn.Parameter, module.weight) for module in modules)
    return [weight for weight in dict.fromkeys(weights) if not weight.requires_grad]


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix and does nothing else: torch's, or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def count_by_kind(names: Iterable[str]) -> str:
    """Layers by the last part of their names, such as "q_proj x 4, v_proj x 4"."""
    counts = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{kind} x {count}" for kind, count in counts.items())


def _fits(name: str, pattern: str) -> bool:
    return name.rpartition(".")[2] == pattern or fnmatchcase(name, pattern)


def _without_aliases(pattern: str, aliases: Mapping[str, Sequence[str]]) -> list[str]:
    """The pattern, and with each name for which its last part stands."""
    start, dot, leaf = pattern.rpartition(".")
    return [pattern, *(f"{start}{dot}{name}" for name in aliases.get(leaf, ()))]
