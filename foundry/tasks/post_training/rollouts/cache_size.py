"""Memory for generating completions, computed from the sizes of the model."""

from typing import Any

from torch import nn

from foundry.tasks.post_training.schemas.rollouts import Rollouts


def cache_bytes(model: nn.Module, settings: Rollouts, seq_len: int, element_size: int) -> int | None:
    """Return the bytes of keys and values for the completions that a rank generates at a time.

    Args:
        model: the model; its transformers configuration has its sizes.
        settings: rollout settings, with the number of completions generated at a time.
        seq_len: tokens of the longest prompt with its completion.
        element_size: bytes of a number in the compute type.

    Returns:
        Bytes, or None if the model has no transformers configuration.
    """
    describe = getattr(model, "hf_config", None)
    config: Any = describe() if callable(describe) else getattr(getattr(model, "causal_lm", None), "config", None)
    if config is None:
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = min(settings.generation_batch_size, settings.samples_per_rollout)
    return int(2 * config.num_hidden_layers * heads * width * seq_len * rows * element_size)
