"""Low-rank adapters (LoRA; Hu et al., 2021): selecting layers, adding adapters and merging their weights."""

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
"""Names that Megatron uses for the linear layers of a block, each with the names used by other code bases."""

_NO_ALIASES: Mapping[str, Sequence[str]] = {}
_KEY = "peft.target_modules"
_ADAPTER = "default"
_SEED_OFFSET = 0x4C6F5241
"""Number added to the seed, so that adapters do not use the same random numbers as the initial weights."""


def match_targets(
    names: Iterable[str], patterns: Iterable[str], aliases: Mapping[str, Sequence[str]] = _NO_ALIASES
) -> list[str]:
    """Return the full names of the layers that match any pattern, in the order of `names`.

    A pattern is either the last part of a dotted name or a wildcard pattern for the whole name. In
    `*.layers.1.*.q_proj` the dots are literal, so layers 10 to 19 do not match.

    Args:
        names: dotted names of the layers that can have an adapter.
        patterns: patterns; a layer is selected if one of them matches.
        aliases: other names for a last part, such as `linear_qkv` for `q_proj`, `k_proj` and `v_proj`.
    """
    plain_patterns = [name for pattern in patterns for name in _without_aliases(pattern, aliases)]
    return [name for name in names if any(_matches(name, pattern) for pattern in plain_patterns)]


def scaling(alpha: float, rank: int, *, rslora: bool = False) -> float:
    """Return the scale of an adapter's product B A: alpha / rank, or for rsLoRA alpha / √rank (Kalajdzievski, 2023)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def merged(weight: Tensor, a: Tensor, b: Tensor, *, alpha: float, rslora: bool = False) -> Tensor:
    """Return the weight of a layer merged with its adapter, weight + scaling x B A, in the dtype of `weight`.

    The sum is computed in float32 or wider and rounded once: in bfloat16 most of a small adapter would be lost.

    Args:
        weight: (out_features, in_features).
        a: (rank, in_features).
        b: (out_features, rank).
        alpha: numerator of the adapter's scale.
        rslora: divide alpha by the square root of the rank instead of the rank.
    """
    dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    delta = scaling(alpha, a.shape[0], rslora=rslora) * (b.to(dtype) @ a.to(dtype))
    return (weight.to(dtype) + delta).to(weight.dtype)


def resolve_targets(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the full names of a model's linear layers that match the patterns.

    Megatron's names match only layers inside blocks, or any layer if the model has no blocks.

    Raises:
        ConfigError: a pattern matches no layer, or it matches the head, whose matrix a language model uses without
            calling the layer.
    """
    layers = {name: module for name, module in model.named_modules() if is_linear(module)}
    blocks = {module for block in find_blocks(model) for module in block.modules()}
    inner = [name for name, module in layers.items() if module in blocks or not blocks]
    find_head: Callable[[], nn.Module | None] = getattr(model, "output_head", lambda: None)
    head = find_head()
    targets = set[str]()
    for pattern in patterns:
        matches = {*match_targets(layers, [pattern]), *match_targets(inner, [pattern], MEGATRON)}
        if not matches:
            layer_names = dict.fromkeys(
                name.rpartition(".")[2] for name, module in layers.items() if module is not head
            )
            message = f"has {pattern}, which matches no linear layer of {type(model).__name__}"
            if set(pattern) & set("|+\\^$()") or ".*" in pattern.lstrip("*"):
                message += " (* and ? are wildcards; regular expressions are not supported)"
            available = f"available: {', '.join(layer_names)}; an example of a full name: {next(iter(inner), 'none')}"
            raise ConfigError(Violation(_KEY, f"{message}; {available}"))
        if heads := [name for name in matches if layers[name] is head]:
            message = f"has {pattern}, which matches {heads[0]}, whose matrix is used without calling the layer"
            raise ConfigError(Violation(_KEY, f"{message}; name the layers of the blocks, such as *.layers.*_proj"))
        targets |= matches
    return [name for name in layers if name in targets]


def add_adapters(model: nn.Module, settings: LoRA, seed: int) -> list[str]:
    """Add adapters to layers of a model and freeze all other parameters, in place; outputs do not change yet.

    Args:
        model: not yet wrapped. The adapters are float32; `<layer>.weight` is renamed to `<layer>.base_layer.weight`.
        settings: adapter settings.
        seed: seed of the adapters' initial weights, which use no other random state.

    Returns:
        Full names of the adapted layers.

    Raises:
        ConfigError: as in `resolve_targets`, or peft cannot add adapters to these layers.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = resolve_targets(model, settings.target_modules)
    config = LoraConfig(
        r=settings.adapter_dim,
        lora_alpha=cast(int, settings.alpha),
        lora_dropout=settings.adapter_dropout or 0.0,
        use_rslora=settings.rslora,
        # A pattern for full names: names in a list would also match the ends of other names.
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
    """Return the layers that have adapters, as peft's `LoraLayer`, keyed by the layer's name without the adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a model, wrapped or not, inside the context; `requires_grad` is not changed.

    peft's `enable_adapters` would change `requires_grad`, which breaks FSDP2 and optimizers built for the model.
    """
    layers = list(adapted_layers(model).values())
    states = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was_disabled in zip(layers, states, strict=True):
            layer._disable_adapters = was_disabled


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters of an unwrapped model into the weights of their layers, and remove the adapters, in place."""
    for layer in adapted_layers(model).values():
        base, a, b = layer.base_layer, layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
        settings = {"alpha": layer.lora_alpha[_ADAPTER], "rslora": layer.use_rslora[_ADAPTER]}
        weight = base.weight if isinstance(base, nn.Linear) else base.weight.T  # a Conv1D has (in, out) features
        weight.copy_(merged(weight, a, b, **settings))
    remove_adapters(model)


def remove_adapters(model: nn.Module) -> None:
    """Replace the adapted layers of an unwrapped model by their base layers, in place."""
    for name, layer in adapted_layers(model).items():
        model.set_submodule(name, layer.base_layer)
    if hasattr(model, "peft_config"):  # set by peft when it injects adapters
        del model.peft_config


def frozen_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the frozen weights of linear layers in blocks, which autocast rounds in every matrix product."""
    modules = (module for block in find_blocks(model) for module in block.modules() if is_linear(module))
    weights = (cast(nn.Parameter, module.weight) for module in modules)
    return [weight for weight in dict.fromkeys(weights) if not weight.requires_grad]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: nn.Linear, or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def count_by_kind(names: Iterable[str]) -> str:
    """Count layers by the last part of their names, such as "q_proj x 4, v_proj x 4"."""
    counts = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{kind} x {count}" for kind, count in counts.items())


def _matches(name: str, pattern: str) -> bool:
    return name.rpartition(".")[2] == pattern or fnmatchcase(name, pattern)


def _without_aliases(pattern: str, aliases: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the pattern, and one variant for each name that its last part is an alias of."""
    start, dot, leaf = pattern.rpartition(".")
    return [pattern, *(f"{start}{dot}{name}" for name in aliases.get(leaf, ()))]
