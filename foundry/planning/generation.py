"""The memory that generating answers takes, from shapes alone."""

from typing import Any

from torch import nn

from foundry.config.schemas.rollouts import Rollouts


def cache_bytes(model: nn.Module, settings: Rollouts, seq_len: int, element_size: int) -> int | None:
    """Bytes of the keys and values of the answers that a rank generates at a time.

    Args:
        model: whose sizes transformers' configuration describes.
        settings: how much is generated.
        seq_len: of the longest prompt with an answer.
        element_size: bytes of a number in the type that is computed in.

    Returns:
        None where the model does not say its sizes.
    """
    describe = getattr(model, "hf_config", None)
    config: Any = describe() if callable(describe) else getattr(getattr(model, "causal_lm", None), "config", None)
    if config is None:
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = min(settings.generation_batch_size, settings.samples_per_rollout)
    return int(2 * config.num_hidden_layers * heads * width * seq_len * rows * element_size)
