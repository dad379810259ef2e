"""A Llama-style decoder in plain PyTorch, with the parameter names of transformers' Llama.

Options, off by default, and their sources:

- `qk_norm`: norms of queries and keys (Henry et al., 2020, arXiv:2010.04245);
- `zero_init_outputs`: blocks start as the identity (Fixup: Zhang et al., 2019, arXiv:1901.09321);
- `residual_scalars`: learned factors on the residual stream and on the embedding before each block (speed records of
  modded-nanogpt, https://github.com/KellerJordan/modded-nanogpt; `resid_lambdas` and `x0_lambdas` of nanochat,
  https://github.com/karpathy/nanochat);
- `value_embeddings`: a learned embedding of each token, added to the values of attention (records of modded-nanogpt,
  after the value residuals of Zhou et al., 2024, arXiv:2410.17897);
- `logit_softcap`: bounded logits (Gemma 2: Gemma Team, 2024, arXiv:2408.00118, section 2);
- `parametrization`: dependence of initial weights and learning rates on the width (`parametrization.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from foundry.config.configured import configured_by
from foundry.config.schemas.model import Transformer as TransformerSettings
from foundry.core.errors import ConfigError
from foundry.models.attention.branches import Branches
from foundry.models.attention.documents import Documents
from foundry.models.attention.varlen import DocumentBounds
from foundry.models.decoder.block import TransformerBlock
from foundry.models.decoder.norms import RMSNorm
from foundry.models.decoder.rotary import rotary_table
from foundry.models.decoder.stack import Decoder
from foundry.models.decoder.value_embedding import ValueEmbedding
from foundry.models.dropout import KeyedDropout
from foundry.models.flops import matmul_flops
from foundry.models.initialisation import draw_weights, matrix_draws, resolve_std
from foundry.models.keyed_draws import Constant, Draw
from foundry.models.kv_cache import KVCache
from foundry.models.parametrization import Role, WidthRules, find_roles
from foundry.models.tensor_parallel import Split
from foundry.models.token_log_probs import Read, TokenLogProbs, project_log_probs
from foundry.models.token_loss import TokenLoss, project_loss

if TYPE_CHECKING:
    from transformers import LlamaConfig, Qwen3Config


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
        embedding_std, init_width = settings.embedding_init_std, settings.init_width
        self.init_std = resolve_std(settings.init_std, init_width)
        self.embedding_init_std = self.init_std if embedding_std is None else resolve_std(embedding_std, init_width)
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
        self._width_rules = WidthRules(settings.width_ratio, self._find_roles())
        self.init_weights()

    def _find_roles(self) -> dict[str, Role]:
        roles = find_roles(self, outputs=("lm_head",))
        return roles if self.lm_head is not None else roles | {"model.norm.weight": Role.output}

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
        branches: Branches | None = None,
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
            branches: layout of a single row whose sequences share prefixes; excludes documents, cache and dropout.

        Raises:
            ValueError: a sequence is longer than max_seq_len.
        """
        if branches is None:
            seq_len = tokens.shape[1] + (0 if cache is None else cache.filled)
        else:
            assert cache is None
            assert dropout_keys is None, "sequences with the same prefix would need different dropout masks in it"
            seq_len = branches.longest
        if seq_len > self.max_seq_len:
            raise ValueError(f"a sequence of {seq_len} tokens exceeds model.max_seq_len={self.max_seq_len}")
        head_dim = self.model.embed_tokens.embedding_dim // self.settings.num_heads
        if cache is None:
            cos, sin = rotary_table(seq_len, head_dim, self.settings.rope_theta, tokens.device)
            packed: Documents | Branches | None = branches
            if documents is not None:
                packed = Documents(documents, document_bounds)
            if packed is not None:
                cos, sin = cos[packed.positions].unsqueeze(1), sin[packed.positions].unsqueeze(1)
            draws = None
            if dropout_keys is not None and self.training:
                draws = _keyed_dropout(dropout_keys, documents, packed, seq_len)
            hidden = self.model(tokens, cos, sin, draws=draws, documents=packed)
        else:
            if cache.rotary is None or len(cache.rotary[0]) < seq_len:
                cache.rotary = rotary_table(cache.length, head_dim, self.settings.rope_theta, tokens.device)
            cos, sin = cache.rotary
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
        """Return the initialization by parameter name: `vector_draws` and `matrix_draws`, scaled to the width."""
        return self._width_rules.scale({**self.vector_draws(), **self.matrix_draws(self)})

    def width_rules(self) -> WidthRules:
        """Return the factors on initial values and learning rates by parameter name."""
        return self._width_rules

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


def _keyed_dropout(
    keys: Tensor, documents: Tensor | None, packed: Documents | Branches | None, seq_len: int
) -> KeyedDropout:
    """Return dropout masks keyed by sample, independent of the sample's place in a packed row."""
    if documents is None or packed is None:
        return KeyedDropout(keys[:, None], torch.arange(seq_len, device=keys.device)[None])
    # Padding has document -1, which indexes the appended key 0.
    return KeyedDropout(torch.cat([keys, keys.new_zeros(1)])[documents], packed.positions)
