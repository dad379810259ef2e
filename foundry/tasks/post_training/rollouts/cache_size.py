"""Memory for generating completions, computed from the sizes of the model."""

from typing import Any

from torch import nn

from foundry.core.model_hooks import hook
from foundry.models.transformer import Transformer
from foundry.tasks.post_training.schemas.rollouts import Rollouts


def cache_bytes(model: nn.Module, settings: Rollouts, seq_len: int, element_size: int) -> int | None:
    """Return the bytes of keys and values for the completions that a rank generates at a time.

    Args:
        model: the model; its settings or its transformers configuration has its sizes.
        settings: rollout settings, with the number of completions generated at a time.
        seq_len: tokens of the longest prompt with its completion.
        element_size: bytes of a number in the compute type.

    Returns:
        Bytes, or None if the model has neither.
    """
    numbers = _per_token(model)
    rows = min(settings.generation_batch_size, settings.samples_per_rollout)
    return None if numbers is None else numbers * seq_len * rows * element_size


def _per_token(model: nn.Module) -> int | None:
    """Return how many numbers the keys and values of a token have in all layers; None if the sizes are unknown.

    The sizes of foundry's decoder are in its settings: with some options it has no transformers configuration.
    """
    if (
        isinstance(model, Transformer) and hook(model, "new_cache") is not None
    ):  # also without a transformers configuration
        sizes = model.settings
        return 2 * sizes.num_layers * sizes.num_kv_heads * (sizes.hidden_size // sizes.num_heads)
    describe = getattr(model, "hf_config", None)
    config: Any = describe() if callable(describe) else getattr(getattr(model, "causal_lm", None), "config", None)
    if config is None:
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width)
