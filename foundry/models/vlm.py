"""A decoder that looks at pictures before it reads, and answers about them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry.config.configured import configured_by
from foundry.config.schemas.model import PrefixVLM as PrefixVLMSettings
from foundry.models.dropout import KeyedDropout
from foundry.models.flops import matmul_flops
from foundry.models.initialisation import matrix_draws
from foundry.models.keyed_draws import Constant, Draw, Normal
from foundry.models.kv_cache import KVCache
from foundry.models.token_log_probs import Read, TokenLogProbs
from foundry.models.token_loss import TokenLoss
from foundry.models.transformer import RMSNorm, Transformer, TransformerBlock, rotary_table, to_compute_dtype
from foundry.models.varlen import DocumentBounds

PATCH = 8
"""Height and width in pixels of what a picture token is made of."""

KeysAndValues = tuple[Tensor, Tensor]
"""(batch, kv heads, pictures and words, head_dim) each, of one layer, after rotation."""


class PictureStem(nn.Module):
    """Strided convolutions from pictures to a token for each patch, with a learned position for each patch.

    Args:
        image_size: height and width of a picture in pixels, a multiple of 8.
        num_images: pictures of a sample.
        hidden_size: width of a token.
    """

    def __init__(self, image_size: int, num_images: int, hidden_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(64, hidden_size, 2, stride=2)
        self.positions = nn.Parameter(torch.zeros(num_images * (image_size // PATCH) ** 2, hidden_size))

    def forward(self, images: Tensor) -> Tensor:
        """Tokens (batch, patches of all pictures, hidden_size) of images: (batch, pictures, 3, size, size) uint8."""
        # From 0..255 to [-1, 1].
        x = (images.flatten(0, 1).float() / 127.5 - 1.0).to(self.conv1.weight.dtype)
        x = self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x)))))
        patches: Tensor = x.flatten(2).transpose(1, 2).reshape(len(images), -1, x.shape[1])
        return patches + self.positions.to(patches.dtype)

    def initial_weights(self) -> dict[str, Draw]:
        """Convolutions are N(0, 1 / fan in), positions N(0, 0.02)."""
        draws: dict[str, Draw] = {"positions": Normal(0.02)}
        for name, conv in self._convolutions():
            draws[f"{name}.weight"] = Normal(conv.weight[0].numel() ** -0.5)
            draws[f"{name}.bias"] = Constant(0.0)
        return draws

    def flops(self) -> float:
        """FLOPs of a forward and backward pass over the pictures of one sample."""
        places, total = 16 * len(self.positions), 0
        for _, conv in self._convolutions():
            total += places * matmul_flops([conv.weight])
            places //= 4
        return float(total)

    def _convolutions(self) -> list[tuple[str, nn.Conv2d]]:
        return [(name, module) for name, module in self.named_children() if isinstance(module, nn.Conv2d)]


class PrefixBlock(TransformerBlock):
    """A block that also gives its keys and values, for others to attend to.

    They are outputs of the forward pass, since FSDP2 gathers a block's weights for the backward pass of its outputs,
    and a checkpointed block computes anew what it has given.
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map x: (batch, seq, hidden_size) to the same shape; its keys and values, (batch, kv heads, seq, head_dim).

        Args:
            x: the residual stream.
            cos: (seq, head_dim), of `rotary_table`.
            sin: as `cos`.
            mask: (batch, 1, seq, seq) bool, which attend to which.
            draws: of dropout.
            keys_only: nothing but keys and values is asked for; x comes back as it was.
        """
        query, key, value = self.self_attn.project(self.input_layernorm(x), cos, sin)
        value = value.clone()  # FSDP2 warns of views among the outputs of a block
        if keys_only:
            return x.clone(), key, value
        return self.add(x, self.self_attn.attend(query, key, value, mask, draws), draws), key, value


class PrefixVLM(Transformer):
    """`Transformer` behind a convolutional stem: pictures are a prefix, of which all see all, that words look back at.

    A prefix language model (Raffel et al., 2020, section 3.2.1) as PaliGemma is (Beyer et al., 2024). Rotary positions
    run on over pictures and words.

    Args:
        settings: those of a decoder, and the number and size of pictures, which do not count in `max_seq_len`.
        hidden_dropout: as of `Transformer`, as is `attention_dropout`.
        attention_dropout: of attention weights.

    Raises:
        ConfigError: the sizes do not divide as they must.
    """

    isolates_documents = False
    block_type = PrefixBlock
    hf_config: Any = None  # transformers has no such model
    tensor_parallel_plan: Any = None
    new_cache: Any = None  # answers are short, and read anew for each word

    settings: PrefixVLMSettings

    @configured_by(PrefixVLMSettings)
    def __init__(
        self, settings: PrefixVLMSettings, *, hidden_dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__(settings, hidden_dropout=hidden_dropout, attention_dropout=attention_dropout)
        assert settings.image_size is not None, "a run without pictures is refused before"
        self.image_size = settings.image_size  # by which samples and `foundry.sample` know that it looks at pictures
        self.stem = PictureStem(settings.image_size, settings.num_images, settings.hidden_size)
        self.init_weights()

    def forward(
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
        """Log-probabilities of the targets, given pictures and the words before; of words alone.

        Of `tokens`, (batch, seq) int64, those below 0 are padding. `images` are (batch, num_images, 3, image_size,
        image_size) uint8. There is no cache, and rows do not hold several samples, since each has its own pictures. All
        else is as for `Transformer.forward`.

        Raises:
            ValueError: the sequence is longer than max_seq_len, no pictures are given, or a cache or documents are.
        """
        if images is None:
            raise ValueError("PrefixVLM answers about pictures and is given none; give images")
        if cache is not None or documents is not None:
            raise ValueError("PrefixVLM has no cache and reads one sample a row")
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
        """Hidden states of pictures and words, and what each layer lets others attend to.

        Args:
            tokens: (batch, words) int64; below 0 is padding, which nobody sees.
            images: (batch, num_images, 3, image_size, image_size) uint8.
            dropout_keys: (batch,) int64, for training with dropout.

        Returns:
            Hidden states (batch, pictures and words, hidden_size), normalised; keys and values of each layer,
            (batch, kv heads, pictures and words, head_dim); and which of these places are no padding, (batch, pictures
            and words) bool.

        Raises:
            ValueError: there are more words than max_seq_len.
        """
        x, kept, is_visible = self._layers(tokens, images, dropout_keys)
        return self.model.norm(x), kept, is_visible

    def observe(self, tokens: Tensor, images: Tensor) -> tuple[list[KeysAndValues], Tensor]:
        """`trunk` without its hidden states: what comes after the last layer's keys and values is not computed."""
        _, kept, is_visible = self._layers(tokens, images, None, keys_only=True)
        return kept, is_visible

    def _layers(
        self, tokens: Tensor, images: Tensor, dropout_keys: Tensor | None, *, keys_only: bool = False
    ) -> tuple[Tensor, list[KeysAndValues], Tensor]:
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens exceeds model.max_seq_len={self.max_seq_len}")
        is_word = tokens >= 0
        words = self.model.embed_tokens(tokens.clamp(min=0)).masked_fill(~is_word[..., None], 0.0)
        pictures = self.stem(images)
        x = torch.cat((to_compute_dtype(pictures), to_compute_dtype(words)), dim=1)
        num_patches, length = pictures.shape[1], x.shape[1]
        is_visible = torch.cat((is_word.new_ones(len(tokens), num_patches), is_word), dim=1)
        mask = prefix_mask(num_patches, is_visible)
        cos, sin = rotary_table(length, x.shape[2] // self.settings.num_heads, self.settings.rope_theta, x.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        draws = None
        if dropout_keys is not None and self.training:
            draws = KeyedDropout(dropout_keys[:, None], torch.arange(length, device=x.device)[None])
        kept = list[KeysAndValues]()
        for index, layer in enumerate(self.model.layers):
            own_draws, is_last = None if draws is None else draws.fold(index), index == len(self.model.layers) - 1
            x, key, value = layer(x, cos, sin, mask, own_draws, keys_only=keys_only and is_last)
            kept.append((key, value))
        return x, kept, is_visible

    def initial_weights(self) -> dict[str, Draw]:
        """Norms are ones, convolutions as `PictureStem` says, all else as of `Transformer`."""
        norms = {f"{name}.weight": Constant(1.0) for name, m in self.named_modules() if isinstance(m, RMSNorm)}
        decoder = matrix_draws(self.model, std=self.init_std, embedding_std=self.embedding_init_std)
        head = {} if self.lm_head is None else {"lm_head.weight": Normal(self.init_std)}
        stem = {f"stem.{name}": draw for name, draw in self.stem.initial_weights().items()}
        return {**norms, **{f"model.{name}": draw for name, draw in decoder.items()}, **head, **stem}

    def init_weights(self, seed: int | None = None) -> None:
        """Draw all weights from scratch, as `initial_weights` says; `seed` as for `draw_weights`."""
        if hasattr(self, "stem"):  # the constructor of the decoder asks before there is one
            super().init_weights(seed)

    def flops_per_sample(self, seq_len: int) -> float:
        """FLOPs of a forward and backward pass over the pictures of a sample and seq_len words; see `Transformer`'s.

        The head is of words alone.
        """
        length = len(self.stem.positions) + seq_len
        attention = 12 * len(self.model.layers) * self.model.embed_tokens.embedding_dim * length
        matrices = [module.weight for module in self.model.modules() if isinstance(module, nn.Linear)]
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return float(length * (matmul_flops(matrices) + attention) + seq_len * matmul_flops([head])) + self.stem.flops()


def prefix_mask(num_patches: int, is_visible: Tensor) -> Tensor:
    """Which places attend to which, (batch, 1, places, places) bool.

    Pictures see each other, words see these and the words before. Padding is seen by itself alone.

    Args:
        num_patches: places of pictures, which come first.
        is_visible: (batch, places) bool, false for padding.
    """
    places = torch.arange(is_visible.shape[1], device=is_visible.device)
    is_before = (places <= places[:, None]) | (places < num_patches)
    return ((is_before & is_visible[:, None, :]) | (places == places[:, None]))[:, None]
