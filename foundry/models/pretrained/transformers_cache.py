"""Key-value caches of models of transformers."""

from typing import Any, Self

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

from foundry.models.kv_cache import Cache, join_right_aligned

_ATTENTION_LAYERS = DynamicLayer, DynamicSlidingWindowLayer
"""Types of layers of transformers' caches whose tensors are keys and values only, (batch, heads, columns, head_dim)."""


class TransformersCache(Cache):
    """Wrapper of transformers' own cache, which supports sliding windows and other kinds of layers.

    Args:
        config: config of the model.
        length: maximum number of columns.
        padding: as in `Cache`.
    """

    def __init__(self, config: PreTrainedConfig, length: int, padding: Tensor | None = None) -> None:
        super().__init__(length, padding)
        self.layers_cache = DynamicCache(config=config)
        self._layers: list[Any] = self.layers_cache.layers
        self.can_merge = all(type(layer) in _ATTENTION_LAYERS for layer in self._layers)

    def merge(self, newcomers: Self, length: int) -> None:
        """Append the sequences of another cache; arguments as in `Cache`."""
        pairs = zip(self._layers, newcomers._layers, strict=True)
        filled = [pair for pair in pairs if pair[0].is_initialized]  # some layers use the keys of other layers
        counts = [len(layer.keys) for layer in filled[0]]
        self._align(newcomers, counts, filled[0][0].keys.device)
        self.length = length
        for layer, other in filled:
            layer.keys = join_right_aligned([layer.keys, other.keys])
            layer.values = join_right_aligned([layer.values, other.values])
            other.keys = other.values = None
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = self.filled

    def _keep(self, rows: Tensor) -> None:
        self.layers_cache.batch_select_indices(rows)
        if self.can_merge and self._drop_padding():
            for layer in self._layers:
                _drop_columns(layer, self.filled)


def _drop_columns(layer: Any, filled: int) -> None:
    """Drop the first columns of a layer, so that at most `filled` remain; a sliding window may have fewer."""
    if layer.is_initialized:
        first = max(layer.keys.shape[2] - filled, 0)
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = filled
