"""A vision-language model: a decoder that attends to image patches as a prefix of the text."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry.config.configured import configured_by
from foundry.config.schemas.model import PrefixVLM as PrefixVLMSettings
from foundry.models.attention.varlen import DocumentBounds
from foundry.models.compute_dtype import to_compute_dtype
from foundry.models.decoder.attention import AttentionContext
from foundry.models.decoder.block import TransformerBlock
from foundry.models.decoder.rotary import rotary_table
from foundry.models.dropout import KeyedDropout
from foundry.models.flops import matmul_flops
from foundry.models.keyed_draws import Constant, Draw, Normal
from foundry.models.kv_cache import KVCache
from foundry.models.token_log_probs import Read, TokenLogProbs
from foundry.models.token_loss import TokenLoss
from foundry.models.transformer import Transformer

PATCH = 8
"""Height and width in pixels of the image patch behind each image token."""

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values of one layer after rotation, (batch, kv heads, image patches + text tokens, head_dim) each."""


class PictureStem(nn.Module):
    """Strided convolutions that map images to one token per patch, plus a learned position embedding per patch.

    Args:
        image_size: height and width of an image in pixels, a multiple of 8.
        num_images: images per sample.
        hidden_size: width of a token.
    """

    def __init__(self, image_size: int, num_images: int, hidden_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(64, hidden_size, 2, stride=2)
        self.positions = nn.Parameter(torch.zeros(num_images * (image_size // PATCH) ** 2, hidden_size))

    def forward(self, images: Tensor) -> Tensor:
        """Map images: (batch, images, 3, size, size) uint8 to tokens (batch, patches of all images, hidden_size)."""
        # From 0..255 to [-1, 1].
        x = (images.flatten(0, 1).float() / 127.5 - 1.0).to(self.conv1.weight.dtype)
        x = self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x)))))
        patches: Tensor = x.flatten(2).transpose(1, 2).reshape(len(images), -1, x.shape[1])
        return patches + self.positions.to(patches.dtype)

    def initial_weights(self) -> dict[str, Draw]:
        """Return the initialization by parameter name: normal, std 1 / √fan_in for convolutions, 0.02 for positions."""
        draws: dict[str, Draw] = {"positions": Normal(0.02)}
        for name, conv in self._convolutions():
            draws[f"{name}.weight"] = Normal(conv.weight[0].numel() ** -0.5)
            draws[f"{name}.bias"] = Constant(0.0)
        return draws

    def flops(self) -> float:
        """Return the FLOPs of a forward and backward pass over the images of one sample."""
        places, total = 16 * len(self.positions), 0
        for _, conv in self._convolutions():
            total += places * matmul_flops([conv.weight])
            places //= 4
        return float(total)

    def _convolutions(self) -> list[tuple[str, nn.Conv2d]]:
        return [(name, module) for name, module in self.named_children() if isinstance(module, nn.Conv2d)]


class PrefixBlock(TransformerBlock):
    """A transformer block that also returns its keys and values, so that other models can attend to them.

    Keys and values are outputs of the forward pass because FSDP2 gathers the weights of a block for the backward pass
    of its outputs, and because a checkpointed block recomputes its outputs.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        draws: KeyedDropout | None = None,
        *,
        keys_only: bool = False,
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new residual stream, (batch, seq, hidden_size), and the block's keys and values.

        Keys and values are (batch, kv heads, seq, head_dim).

        Args:
            x: residual stream, (batch, seq, hidden_size).
            cos: (seq, head_dim), from `rotary_table`.
            sin: as `cos`.
            mask: (batch, 1, seq, seq) bool, true where a query may attend to a key.
            draws: dropout masks.
            keys_only: compute keys and values only, and return the block's input as the residual stream.
            embedded: argument of `rescale`.
        """
        x = self.rescale(x, embedded)
        query, key, value = self.self_attn.project(self.input_layernorm(x), cos, sin)
        value = value.clone()  # FSDP2 warns about block outputs that are views
        if keys_only:
            return x.clone(), key, value
        attended = self.self_attn.attend(query, key, value, AttentionContext(mask=mask, draws=draws))
        return self.add(x, attended, draws), key, value


class PrefixVLM(Transformer):
    """`Transformer` with image patches as a prefix: bidirectional attention over images, causal attention over text.

    A convolutional stem embeds the images. It is a prefix language model (Raffel et al., 2020, section 3.2.1) like
    PaliGemma (Beyer et al., 2024). Rotary positions are continuous across image patches and text.

    Args:
        settings: decoder settings, and the number and size of images, whose patches do not count in `max_seq_len`.
        hidden_dropout: as for `Transformer`.
        attention_dropout: as for `Transformer`.

    Raises:
        ConfigError: as for `Transformer`, or image_size is not a multiple of 8.
    """

    isolates_documents = False
    block_type = PrefixBlock
    hf_config: Any = None  # transformers has no equivalent model
    tensor_parallel_plan: Any = None
    new_cache: Any = None  # not supported: answers are short, and the model reruns the whole sequence for each token

    settings: PrefixVLMSettings

    @configured_by(PrefixVLMSettings)
    def __init__(
        self, settings: PrefixVLMSettings, *, hidden_dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__(settings, hidden_dropout=hidden_dropout, attention_dropout=attention_dropout)
        assert settings.image_size is not None, "a run without images is rejected earlier"
        self.image_size = settings.image_size  # by this attribute `foundry.sample` detects that the model reads images
        self.stem = PictureStem(settings.image_size, settings.num_images, settings.hidden_size)
        self.init_weights()

    def forward(  # type: ignore[override] # does not support `branches`, because each sample has its own images
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        images: Tensor | None = None,
        cache: KVCache | None = None,
        return_logits: bool = False,
        read: Read | None = None,
        per_token: Sequence[Tensor] = (),
        token_loss: TokenLoss | None = None,
        dropout_keys: Tensor | None = None,
        documents: Tensor | None = None,
        document_bounds: DocumentBounds | None = None,
    ) -> TokenLogProbs:
        """Return the log-probabilities of the targets, given the images and the preceding text tokens.

        Outputs cover text positions only. In `tokens`, (batch, seq) int64, negative values are padding. `images` are
        (batch, num_images, 3, image_size, image_size) uint8. There is no cache, and rows do not hold several samples,
        because each sample has its own images. The other arguments are as for `Transformer.forward`.

        Raises:
            ValueError: the sequence is longer than max_seq_len, images are missing, or a cache or documents are passed.
        """
        if images is None:
            raise ValueError("PrefixVLM requires images")
        if cache is not None or documents is not None:
            raise ValueError("PrefixVLM supports no cache and only one sample per row")
        hidden, _, _ = self.trunk(tokens, images, dropout_keys=dropout_keys)
        return self._answer(
            hidden[:, -tokens.shape[1] :],
            targets,
            token_loss=token_loss,
            return_logits=return_logits,
            read=read,
            per_token=per_token,
        )

    def trunk(
        self, tokens: Tensor, images: Tensor, *, dropout_keys: Tensor | None = None
    ) -> tuple[Tensor, list[KeysAndValues], Tensor]:
        """Return hidden states of images and text, and the keys and values of each layer.

        Args:
            tokens: (batch, text tokens) int64; negative values are padding, which other positions do not attend to.
            images: (batch, num_images, 3, image_size, image_size) uint8.
            dropout_keys: (batch,) int64, for training with dropout.

        Returns:
            Normalized hidden states, (batch, image patches + text tokens, hidden_size); keys and values of each layer,
            (batch, kv heads, image patches + text tokens, head_dim); and a mask, (batch, image patches + text tokens)
            bool, that is False at padding.

        Raises:
            ValueError: there are more text tokens than max_seq_len.
        """
        x, cache, is_visible = self._layers(tokens, images, dropout_keys)
        return self.model.norm(x), cache, is_visible

    def observe(self, tokens: Tensor, images: Tensor) -> tuple[list[KeysAndValues], Tensor]:
        """Return the keys and values, and the padding mask, that `trunk` returns.

        Hidden states of the last layer are not computed.
        """
        _, cache, is_visible = self._layers(tokens, images, None, keys_only=True)
        return cache, is_visible

    def _layers(
        self, tokens: Tensor, images: Tensor, dropout_keys: Tensor | None, *, keys_only: bool = False
    ) -> tuple[Tensor, list[KeysAndValues], Tensor]:
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens exceeds model.max_seq_len={self.max_seq_len}")
        is_token = tokens >= 0
        embeddings = self.model.embed_tokens(tokens.clamp(min=0)).masked_fill(~is_token[..., None], 0.0)
        pictures = self.stem(images)
        x = torch.cat((to_compute_dtype(pictures), to_compute_dtype(embeddings)), dim=1)
        num_patches, length = pictures.shape[1], x.shape[1]
        is_visible = torch.cat((is_token.new_ones(len(tokens), num_patches), is_token), dim=1)
        mask = prefix_mask(num_patches, is_visible)
        cos, sin = rotary_table(length, x.shape[2] // self.settings.num_heads, self.settings.rope_theta, x.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        draws = None
        if dropout_keys is not None and self.training:
            draws = KeyedDropout(dropout_keys[:, None], torch.arange(length, device=x.device)[None])
        cache, options = list[KeysAndValues](), self.model.block_options(x)
        for index, layer in enumerate(self.model.layers):
            layer_draws, is_last = None if draws is None else draws.fold(index), index == len(self.model.layers) - 1
            x, key, value = layer(x, cos, sin, mask, layer_draws, keys_only=keys_only and is_last, **options)
            cache.append((key, value))
        return x, cache, is_visible

    def initial_weights(self) -> dict[str, Draw]:
        """Return the initialization by parameter name.

        The stem is as in `PictureStem`, and the rest as in `Transformer`.
        """
        decoder = self.matrix_draws(self.model)
        head = {} if self.lm_head is None else {"lm_head.weight": Normal(self.init_std)}
        stem = {f"stem.{name}": draw for name, draw in self.stem.initial_weights().items()}
        return {**self.vector_draws(), **{f"model.{name}": draw for name, draw in decoder.items()}, **head, **stem}

    def init_weights(self, seed: int | None = None) -> None:
        """Initialize all weights as defined by `initial_weights`; `seed` as for `draw_weights`."""
        if hasattr(self, "stem"):  # the constructor of the base class calls this before the stem exists
            super().init_weights(seed)

    def flops_per_sample(self, seq_len: int) -> float:
        """Return the FLOPs of a forward and backward pass over the images of a sample and seq_len text tokens.

        The FLOPs are counted as in `Transformer.flops_per_sample`. The head is applied to text positions only.
        """
        length = len(self.stem.positions) + seq_len
        attention = 12 * len(self.model.layers) * self.model.embed_tokens.embedding_dim * length
        matrices = [module.weight for module in self.model.modules() if isinstance(module, nn.Linear)]
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return float(length * (matmul_flops(matrices) + attention) + seq_len * matmul_flops([head])) + self.stem.flops()


def prefix_mask(num_patches: int, is_visible: Tensor) -> Tensor:
    """Return the prefix-LM attention mask, (batch, 1, positions, positions) bool.

    Image positions attend to all image positions; text positions attend to images and to the text up to and including
    themselves. A padding position attends to itself too, and no other position attends to it.

    Args:
        num_patches: number of image positions, which come first.
        is_visible: (batch, positions) bool, False at padding.
    """
    places = torch.arange(is_visible.shape[1], device=is_visible.device)
    is_before = (places <= places[:, None]) | (places < num_patches)
    return ((is_before & is_visible[:, None, :]) | (places == places[:, None]))[:, None]
