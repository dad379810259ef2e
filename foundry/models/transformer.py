"""A Llama-style decoder in plain PyTorch, with the parameter names of transformers' Llama.

Options, off by default, and their sources:

- `qk_norm`: norms of queries and keys (Henry et al., 2020, arXiv:2010.04245);
- `zero_init_outputs`: blocks start as the identity (Fixup: Zhang et al., 2019, arXiv:1901.09321);
- `residual_scalars`: learned factors on the residual stream and on the embedding before each block (speed records of
  modded-nanogpt, https://github.com/KellerJordan/modded-nanogpt; `resid_lambdas` and `x0_lambdas` of nanochat,
  https://github.com/karpathy/nanochat);
- `value_embeddings`: a learned embedding of each token, added to the values of attention (records of modded-nanogpt,
  after the value residuals of Zhou et al., 2024, arXiv:2410.17897);
- `logit_softcap`: bounded logits (Gemma 2: Gemma Team, 2024, arXiv:2408.00118, section 2).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry.config.configured import configured_by
from foundry.config.schemas.model import Transformer as TransformerSettings
from foundry.core.errors import ConfigError
from foundry.core.sharded import local_part
from foundry.models.documents import Documents
from foundry.models.dropout import KeyedDropout, attend_with_dropout
from foundry.models.flops import matmul_flops
from foundry.models.fsdp_block import FSDPBlock
from foundry.models.initialisation import draw_weights, matrix_draws, resolve_std
from foundry.models.keyed_draws import Constant, Draw
from foundry.models.kv_cache import KVCache, LayerCache
from foundry.models.tensor_parallel import Split, replicated_weight
from foundry.models.token_log_probs import Read, TokenLogProbs, project_log_probs
from foundry.models.token_loss import TokenLoss, project_loss
from foundry.models.varlen import DocumentBounds

if TYPE_CHECKING:
    from transformers import LlamaConfig, Qwen3Config


class RMSNorm(nn.Module):
    """Root-mean-square normalization (Zhang and Sennrich, 2019), computed in fp32; the output has the input's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x: (..., hidden_size) over its last dimension."""
        return self.normalize(x, local_part(self.weight))

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize x: (..., hidden_size) over its last dimension with the whole weight, (hidden_size,)."""
        # An fp32 weight would promote the residual stream to fp32. With FSDP2 the weight is bf16 already.
        weight = weight.to(x.dtype)
        if x.device.type != "cuda":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # Since torch 2.12, autocast on CUDA casts the inputs to fp32 and the output back, which the kernel does itself.
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, weight.shape, weight, self.eps)


class HeadNorm(RMSNorm):
    """`RMSNorm` of each head's queries or keys (QK-norm: Henry et al., 2020, arXiv:2010.04245; as in Qwen3)."""

    def forward(self, x: Tensor, projection: Tensor) -> Tensor:  # type: ignore[override]
        """Normalize x: (batch, heads, seq, head_dim), the output of a matrix.

        Under tensor parallelism each rank has the matrix of some heads, and the gradient of the norm's weight is
        summed over the ranks of the matrix.
        """
        return self.normalize(x, replicated_weight(self.weight, projection))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped-query heads."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        dropout: float = 0.0,
        *,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.head_dim = hidden_size // num_heads
        self.grouped = num_kv_heads != num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.q_norm = None if qk_norm_eps is None else HeadNorm(self.head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else HeadNorm(self.head_dim, qk_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: Tensor | DocumentBounds | None = None,
        draws: KeyedDropout | None = None,
        documents: Documents | None = None,
        *,
        token_values: Tensor | None = None,
    ) -> Tensor:
        """Attend within x: (batch, seq, hidden_size) and to cached keys and values; cos, sin: (..., seq, head_dim).

        `token_values` is the argument of `project`.
        """
        query, key, value = self.project(x, cos, sin, token_values)
        if cache is not None:
            key, value = cache.append(key, value)
        return self.attend(query, key, value, mask, draws, documents)

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, token_values: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to rotated queries and keys, and values; (batch, heads or kv heads, seq, head_dim) each.

        `token_values`, (batch, seq, kv heads * head_dim), are added to the values; under tensor parallelism both cover
        the heads of this rank.
        """
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query, self.q_proj.weight), self.k_norm(key, self.k_proj.weight)
        if token_values is not None:
            value = value + token_values.view(*token_values.shape[:2], -1, self.head_dim).transpose(1, 2)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | DocumentBounds | None = None,
        draws: KeyedDropout | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Compute the attention output, (batch, queries, hidden_size), of tensors returned by `project`.

        Args:
            query: (batch, heads, queries, head_dim).
            key: (batch, kv heads, keys, head_dim).
            value: as `key`.
            mask: (batch or 1, 1, queries, keys) bool, true where a query may attend to a key; or document bounds, for
                causal attention within documents, with as many keys as queries. None for causal attention, or for
                attention to all keys if there are fewer queries than keys.
            draws: dropout masks of the attention weights; None disables dropout.
            documents: document layout of packed rows.
        """
        is_causal = mask is None and query.shape[2] == key.shape[2]  # a single query without mask attends to all keys
        if isinstance(mask, DocumentBounds):
            heads_output = mask.attend(query, key, value)
        elif draws is not None and self.dropout > 0:
            heads_output = attend_with_dropout(
                query, key, value, mask if documents is None else documents.mask, self.dropout, draws
            )
        elif documents is not None:
            heads_output = documents.attend(query, key, value, grouped=self.grouped)
        else:
            heads_output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=self.grouped
            )
        output: Tensor = self.o_proj(heads_output.transpose(1, 2).flatten(-2))
        return output


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x: (batch, seq, hidden_size)."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class TransformerBlock(FSDPBlock):
    """Pre-norm transformer block: attention and feed-forward layers with residual connections."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        norm_eps: float,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        *,
        qk_norm: bool = False,
        residual_scalars: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = hidden_dropout
        self.self_attn = Attention(
            hidden_size, num_heads, num_kv_heads, attention_dropout, qk_norm_eps=norm_eps if qk_norm else None
        )
        self.mlp = FeedForward(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)
        self.residual_scale = nn.Parameter(torch.ones(())) if residual_scalars else None
        self.embedding_scale = nn.Parameter(torch.zeros(())) if residual_scalars else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: Tensor | DocumentBounds | None = None,
        draws: KeyedDropout | None = None,
        documents: Documents | None = None,
        *,
        embedded: Tensor | None = None,
        token_values: Tensor | None = None,
    ) -> Tensor:
        """Map x: (batch, seq, hidden_size) to the same shape; cos, sin: (..., seq, head_dim).

        `embedded` is the argument of `rescale`, and `token_values` that of `Attention.project`.
        """
        x = self.rescale(x, embedded)
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, cos, sin, cache, mask, draws, documents, token_values=token_values)
        return self.add(x, attended, draws)

    def rescale(self, x: Tensor, embedded: Tensor | None) -> Tensor:
        """Return residual_scale * x + embedding_scale * embedded; a block without these scalars returns x.

        Args:
            x: residual stream, (batch, seq, hidden_size).
            embedded: input of the first block, of the same shape; None if the block has no scalars.
        """
        if self.residual_scale is None or self.embedding_scale is None:
            return x
        assert embedded is not None
        # Rounded to the dtype of x on all devices: GPUs would round them, and CPUs would not.
        return self.residual_scale.to(x.dtype) * x + self.embedding_scale.to(x.dtype) * embedded

    def add(self, x: Tensor, attended: Tensor, draws: KeyedDropout | None = None) -> Tensor:
        """Add the attention output to the residual stream x, then the feed-forward output."""
        x = x + self._drop(attended, draws, 0)
        output: Tensor = x + self._drop(self.mlp(self.post_attention_layernorm(x)), draws, 1)
        return output

    def _drop(self, x: Tensor, draws: KeyedDropout | None, place: int) -> Tensor:
        return x if draws is None or self.dropout == 0 else draws.fold(place).hidden(x, self.dropout)


class ValueEmbedding(nn.Module):
    """Learned values of each token for the attention of one layer, times a learned factor that starts at 0.

    Args:
        vocab_size: number of tokens.
        width: size of a layer's values, kv heads * head_dim.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        # Not drawn here, so that the random numbers of other parts do not depend on this option.
        empty = torch.empty(vocab_size, width)
        self.table: nn.Embedding = nn.Embedding.from_pretrained(empty, freeze=False)  # type: ignore[no-untyped-call]
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, seq, width) values for tokens: (batch, seq) int64.

        Under tensor parallelism, the width is that of the heads of this rank.
        """
        return to_compute_dtype(replicated_weight(self.scale, self.table.weight) * self.table(tokens))


class Decoder(nn.Module):
    """The decoder without its head.

    Args:
        embed_tokens: token embedding.
        layers: blocks.
        norm: norm of the hidden states.
        value_embeddings: value embeddings by the index of their layer.
        residual_scalars: the blocks have residual scalars, and take the input of the first block as an argument.
    """

    def __init__(
        self,
        embed_tokens: nn.Embedding,
        layers: nn.ModuleList,
        norm: RMSNorm,
        *,
        value_embeddings: Mapping[int, ValueEmbedding] | None = None,
        residual_scalars: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm
        self.value_embeddings = nn.ModuleDict({str(layer): part for layer, part in (value_embeddings or {}).items()})
        self.residual_scalars = residual_scalars

    def forward(
        self,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None = None,
        draws: KeyedDropout | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Map tokens: (batch, seq) int64 to hidden states (batch, seq, hidden_size); cos, sin: (..., seq, head_dim)."""
        x = to_compute_dtype(self.embed_tokens(tokens))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        mask: Tensor | DocumentBounds | None = None
        if cache is not None:
            seq_len = tokens.shape[1]
            bounds = cache.bounds(seq_len, x.device, x.dtype, head_dim=cos.shape[-1])
            mask = cache.mask(seq_len, x.device) if bounds is None else bounds
        embedded = x
        for index, layer in enumerate(self.layers):
            options = self.block_options(embedded)
            if str(index) in self.value_embeddings:
                options["token_values"] = self.value_embeddings[str(index)](tokens)
            if cache is not None:
                x = layer(x, cos, sin, cache.layers[index], mask, **options)
            elif draws is None and documents is None:
                x = layer(x, cos, sin, **options)
            else:
                layer_draws = None if draws is None else draws.fold(index)
                x = layer(x, cos, sin, draws=layer_draws, documents=documents, **options)
        normed: Tensor = self.norm(x)
        return normed

    def block_options(self, embedded: Tensor) -> dict[str, Tensor]:
        """Return keyword arguments of every block, given the input of the first block, (batch, seq, hidden_size)."""
        return {"embedded": embedded} if self.residual_scalars else {}


class Transformer(nn.Module):
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    Dropout applies only in training mode, and only if `forward` gets dropout keys.

    Args:
        settings: widths, numbers of layers and heads, and initialization.
        hidden_dropout: dropout probability of the attention and feed-forward outputs that are added to the residual
            stream.
        attention_dropout: dropout probability of the attention weights.

    Raises:
        ConfigError: num_heads does not divide hidden_size into even head sizes, or num_kv_heads does not divide
            num_heads.
    """

    isolates_documents = True
    block_type: ClassVar[type[TransformerBlock]] = TransformerBlock

    @configured_by(TransformerSettings)
    def __init__(
        self, settings: TransformerSettings, *, hidden_dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        if violations := list(settings.check()):
            raise ConfigError(violations)
        self.settings, self.max_seq_len, width = settings, settings.max_seq_len, settings.hidden_size
        embedding_std = settings.embedding_init_std
        self.init_std = resolve_std(settings.init_std, width)
        self.embedding_init_std = self.init_std if embedding_std is None else resolve_std(embedding_std, width)
        blocks = (
            self.block_type(
                width,
                settings.intermediate_size,
                settings.num_heads,
                settings.num_kv_heads,
                settings.norm_eps,
                hidden_dropout,
                attention_dropout,
                qk_norm=settings.qk_norm,
                residual_scalars=settings.residual_scalars,
            )
            for _ in range(settings.num_layers)
        )
        embedding = nn.Embedding(settings.vocab_size, width)
        value_width = settings.num_kv_heads * (width // settings.num_heads)
        self.model = Decoder(
            embedding,
            nn.ModuleList(blocks),
            RMSNorm(width, settings.norm_eps),
            value_embeddings={
                layer: ValueEmbedding(settings.vocab_size, value_width) for layer in settings.value_embedding_layers
            },
            residual_scalars=settings.residual_scalars,
        )
        self.lm_head = None if settings.tie_embeddings else nn.Linear(width, settings.vocab_size, bias=False)
        self.init_weights()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        return_logits: bool = False,
        read: Read | None = None,
        per_token: Sequence[Tensor] = (),
        token_loss: TokenLoss | None = None,
        dropout_keys: Tensor | None = None,
        documents: Tensor | None = None,
        document_bounds: DocumentBounds | None = None,
    ) -> TokenLogProbs:
        """Return the log-probabilities of the targets.

        Args:
            tokens: (batch, seq) int64.
            targets: (batch, seq) int64, the token after each position, -100 where ignored; None computes only logits.
            cache: cache of the preceding tokens, from `new_cache`; these tokens are appended to it. Targets must be
                None, and the logits cover the last position only, (batch, 1, vocab).
            return_logits: also return the logits, (batch, seq, vocab).
            read: function that computes further values from the logits.
            per_token: (batch, seq, ...) each, further arguments of `read`.
            token_loss: settings of the loss to compute; logits and the outputs of `read` are not returned then.
            dropout_keys: (samples,) int64, key of each sample, for training with dropout.
            documents: (batch, seq) int64, index of each token's sample in packed rows, -1 for padding; None if row i is
                sample i.
            document_bounds: bounds of the same documents, for attention without a mask on GPUs.

        Raises:
            ValueError: the sequence is longer than max_seq_len.
        """
        seq_len = tokens.shape[1] + (0 if cache is None else cache.filled)
        if seq_len > self.max_seq_len:
            raise ValueError(f"a sequence of {seq_len} tokens exceeds model.max_seq_len={self.max_seq_len}")
        head_dim = self.model.embed_tokens.embedding_dim // self.settings.num_heads
        cos, sin = rotary_table(seq_len, head_dim, self.settings.rope_theta, tokens.device)
        if cache is None:
            packed = None if documents is None else Documents(documents, document_bounds)
            if packed is not None:
                cos, sin = cos[packed.positions].unsqueeze(1), sin[packed.positions].unsqueeze(1)
            draws = None
            if dropout_keys is not None and self.training:
                draws = _keyed_dropout(dropout_keys, documents, packed, seq_len)
            hidden = self.model(tokens, cos, sin, draws=draws, documents=packed)
        else:
            positions = cache.positions(tokens.shape[0], tokens.shape[1], tokens.device)
            hidden = self.model(tokens, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), cache)[:, -1:]
            cache.advance(tokens.shape[1])
        return self._answer(
            hidden, targets, token_loss=token_loss, return_logits=return_logits, read=read, per_token=per_token
        )

    def _answer(
        self,
        hidden: Tensor,
        targets: Tensor | None,
        *,
        token_loss: TokenLoss | None,
        return_logits: bool,
        read: Read | None,
        per_token: Sequence[Tensor],
    ) -> TokenLogProbs:
        """Apply the head to hidden states (batch, seq, hidden_size) and return the output of `forward`."""
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if token_loss is not None and targets is not None:
            return project_loss(
                hidden,
                head,
                targets,
                token_loss,
                softcap=self.settings.logit_softcap,
                tile_tokens=self.settings.logprob_tile_tokens,
            )
        return project_log_probs(
            hidden,
            head,
            targets,
            softcap=self.settings.logit_softcap,
            tile_tokens=self.settings.logprob_tile_tokens,
            return_logits=return_logits,
            read=read,
            per_token=per_token,
        )

    def new_cache(self, length: int, padding: Tensor | None = None) -> KVCache:
        """Return an empty cache for `forward`; arguments as for `Cache`."""
        return KVCache(len(self.model.layers), length, padding)

    def initial_weights(self) -> dict[str, Draw]:
        """Return the initialization by parameter name, as in `vector_draws` and `matrix_draws`."""
        return {**self.vector_draws(), **self.matrix_draws(self)}

    def vector_draws(self) -> dict[str, Draw]:
        """Return the initialization of vectors and scalars: ones, but zeros for factors of embeddings."""
        draws = dict[str, Draw]()
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                draws[f"{name}.weight"] = Constant(1.0)
            elif isinstance(module, ValueEmbedding):
                draws[f"{name}.scale"] = Constant(0.0)
            elif isinstance(module, TransformerBlock) and self.settings.residual_scalars:
                draws[f"{name}.residual_scale"], draws[f"{name}.embedding_scale"] = Constant(1.0), Constant(0.0)
        return draws

    def matrix_draws(self, part: nn.Module) -> dict[str, Draw]:
        """Return the initialization of the matrices of this model, or of a part that contains its blocks."""
        return matrix_draws(
            part,
            std=self.init_std,
            embedding_std=self.embedding_init_std,
            zero_outputs=self.settings.zero_init_outputs,
        )

    def init_weights(self, seed: int | None = None) -> None:
        """Initialize all weights as defined by `initial_weights`; `seed` as for `draw_weights`."""
        draw_weights(self, self.initial_weights(), seed)

    def output_head(self) -> nn.Module | None:
        """Return the projection onto the vocabulary; None if it is tied to the embedding."""
        return self.lm_head

    def tensor_parallel_plan(self) -> dict[str, Split]:
        """Return the tensor-parallel plan: heads, feed-forward width and vocabulary are sharded, norms replicated."""
        block = {
            "self_attn": Split.input,
            **{f"self_attn.{name}_proj": Split.columns for name in "qkv"},
            "self_attn.o_proj": Split.rows,
            "mlp": Split.input,
            **{f"mlp.{name}_proj": Split.columns for name in ("gate", "up")},
            "mlp.down_proj": Split.rows,
        }
        plan = {f"model.layers.*.{name}": split for name, split in block.items()}
        plan |= {"model.embed_tokens": Split.vocabulary, "lm_head": Split.vocabulary}
        return plan | {"model.value_embeddings.*.table": Split.columns}

    def flops_per_sample(self, seq_len: int) -> float:
        """Return the FLOPs of a forward and backward pass over one sequence of seq_len tokens.

        Per token 6 N + 12 L H Q T (PaLM, Chowdhery et al., 2022, appendix B), with N parameters in matrix products
        including the head, L layers, H heads of dimension Q, and T = seq_len. The FLOPs that causal masking could save
        are not subtracted. A frozen matrix counts 4 instead of 6.
        """
        attention = 12 * len(self.model.layers) * self.model.embed_tokens.embedding_dim * seq_len
        matrices = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]
        head_weights = [self.model.embed_tokens.weight] if self.lm_head is None else []
        return float(seq_len * (matmul_flops([*matrices, *head_weights]) + attention))

    def hf_config(self) -> "LlamaConfig | Qwen3Config":
        """Return the transformers config of this architecture; `export_state` returns the matching weights.

        It is Llama's; with `qk_norm`, it is Qwen3's.

        Raises:
            ConfigError: no class of transformers computes the same function.
        """
        if violations := list(self.settings.check_export()):
            raise ConfigError(violations)
        from transformers import LlamaConfig, Qwen3Config

        kind, name = (Qwen3Config, "Qwen3ForCausalLM") if self.settings.qk_norm else (LlamaConfig, "LlamaForCausalLM")
        return kind(
            architectures=[name],
            vocab_size=self.model.embed_tokens.num_embeddings,
            hidden_size=self.model.embed_tokens.embedding_dim,
            intermediate_size=self.settings.intermediate_size,
            num_hidden_layers=len(self.model.layers),
            num_attention_heads=self.settings.num_heads,
            num_key_value_heads=self.settings.num_kv_heads,
            head_dim=self.model.embed_tokens.embedding_dim // self.settings.num_heads,
            max_position_embeddings=self.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": self.settings.rope_theta},
            rms_norm_eps=self.settings.norm_eps,
            tie_word_embeddings=self.lm_head is None,
            initializer_range=self.init_std,
            dtype=torch.float32,
            bos_token_id=None,
            eos_token_id=None,
        )

    def export_state(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of the state dict, whose names are already the names of transformers."""
        return dict(state_dict)


def to_compute_dtype(x: Tensor) -> Tensor:
    """Cast to autocast's dtype if autocast is on, so that the residual stream has the same dtype as with FSDP2."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


def rotary_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions, (seq_len, head_dim) float32 each (Su et al., 2021).

    Angles repeat for both halves of a head, as in transformers. Both are computed in each forward pass, which costs
    little. A buffer would be rounded by `.to(torch.bfloat16)` and left empty by initialization on the meta device.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = positions[:, None] / theta**exponents
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x: (batch, heads, seq, head_dim); cos, sin: (..., seq, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _keyed_dropout(keys: Tensor, documents: Tensor | None, packed: Documents | None, seq_len: int) -> KeyedDropout:
    """Return dropout masks keyed by sample, independent of the sample's place in a packed row."""
    if documents is None or packed is None:
        return KeyedDropout(keys[:, None], torch.arange(seq_len, device=keys.device)[None])
    # Padding has document -1, which indexes the appended key 0.
    return KeyedDropout(torch.cat([keys, keys.new_zeros(1)])[documents], packed.positions)
