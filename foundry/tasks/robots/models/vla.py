"""Vision-language-action policy: an action expert on a vision-language model."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from foundry.config.configured import configured_by
from foundry.models.compute_dtype import to_compute_dtype
from foundry.models.decoder.attention import AttentionContext
from foundry.models.decoder.block import TransformerBlock
from foundry.models.decoder.norms import RMSNorm
from foundry.models.decoder.rotary import rotary_table
from foundry.models.dit import TimestepEmbedder
from foundry.models.flops import matmul_flops
from foundry.models.initialisation import draw_weights
from foundry.models.keyed_draws import Constant, Draw, Normal, Uniform
from foundry.models.vlm import KeysAndValues, PrefixVLM
from foundry.tasks.robots.schemas.model import VLA as VLASettings

_BACKBONE = "backbone."


class Observed(NamedTuple):
    """Features of an observation that the expert attends to.

    Attributes:
        keys_and_values: keys and values of each layer of the backbone.
        is_visible: (batch, image and text tokens) bool, false for padding.
    """

    keys_and_values: list[KeysAndValues]
    is_visible: Tensor


class ExpertBlock(TransformerBlock):
    """A transformer block that attends to keys and values of the backbone in addition to its own."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> Tensor:
        """Map x: (batch, seq, hidden_size) to the same shape.

        Args:
            x: the residual stream of state and actions.
            cos: cosines from `rotary_table`, (batch, 1, seq, head_dim).
            sin: sines from `rotary_table`, of the same shape.
            key: keys of the backbone's layer, (batch, kv heads, image and text tokens, head_dim).
            value: values of the backbone's layer, of the same shape.
            mask: (batch, 1, 1, image and text tokens + seq) bool, true for tokens that can be attended to.
        """
        query, own_key, own_value = self.self_attn.project(self.input_layernorm(x), cos, sin)
        keys, values = torch.cat((key, own_key), dim=2), torch.cat((value, own_value), dim=2)
        return self.add(x, self.self_attn.attend(query, keys, values, AttentionContext(mask=mask)))


class VLA(nn.Module):
    """A flow expert on a vision-language model, as in pi0 (Black et al., 2024, arXiv:2410.24164).

    The state and each action of a chunk are a token of the expert. The expert has as many blocks as the backbone has
    layers, of the same width. In each block, the expert's tokens attend to each other and to the keys and values of
    image and text tokens in the corresponding layer of the backbone. Rotary positions continue after each row's text.
    The backbone does not depend on the actions, so it runs once for a chunk of several sampling steps.

    The state is multiplied by `state_scale`: the velocity predicts the next action of a demonstration so well that a
    policy which learns from it first ignores the other inputs and repeats its motion (copycat problem: Wen et al.,
    2020, arXiv:2010.14876).

    Args:
        settings: sizes of the expert, of states and of chunks.
        backbone: encodes images and text; it is trained too, except for the weights that only affect text output.
    """

    @configured_by(VLASettings)
    def __init__(self, settings: VLASettings, *, backbone: PrefixVLM) -> None:
        super().__init__()
        self.backbone, self.state_scale = backbone, settings.state_scale
        self._backbone_draws = backbone.initial_weights()  # before freezing: initial_weights refuses frozen weights
        hidden_size, self.num_tokens = backbone.model.embed_tokens.embedding_dim, settings.horizon + 1
        self.state_embedder = nn.Linear(settings.num_observations * settings.state_dim, hidden_size)
        self.action_embedder = nn.Linear(settings.action_dim, hidden_size)
        self.positions = nn.Parameter(torch.zeros(self.num_tokens, hidden_size))
        self.timestep_embedder = TimestepEmbedder(hidden_size)
        heads, qk_norm = (backbone.settings.num_heads, backbone.settings.num_kv_heads), backbone.settings.qk_norm
        self.blocks = nn.ModuleList(
            ExpertBlock(hidden_size, settings.intermediate_size, *heads, backbone.settings.norm_eps, qk_norm=qk_norm)
            for _ in backbone.model.layers
        )
        self.norm = RMSNorm(hidden_size, backbone.settings.norm_eps)
        self.action_head = nn.Linear(hidden_size, settings.action_dim)
        self._freeze_unread()
        self.init_weights()

    def _freeze_unread(self) -> None:
        """Freeze the backbone's layers that follow its last keys and values, because no action depends on them.

        A trainable parameter without a gradient would be an error under DDP, and would decay under AdamW.
        """
        for module in (*_after_keys(self.backbone), self.backbone.model.norm, self.backbone.lm_head):
            if module is not None:
                module.requires_grad_(False)

    def forward(
        self,
        actions: Tensor,
        timesteps: Tensor,
        state: Tensor,
        images: Tensor,
        instruction: Tensor,
        *,
        observed: Observed | None = None,
    ) -> Tensor:
        """Predict the target of the objective from noisy actions: their velocity, the clean actions or their noise.

        Args:
            actions: (batch, horizon, action_dim) float32.
            timesteps: (batch,) float32.
            state: (batch, num_observations, state_dim) float32.
            images: (batch, num_observations, 3, image_size, image_size) uint8.
            instruction: (batch, text tokens) int64, -1 after its end.
            observed: result of `observe` for these observations; None computes it here.

        Returns:
            (batch, horizon, action_dim) float32.
        """
        keys_and_values, is_visible = self._read(images, instruction) if observed is None else observed
        dtype = self.action_embedder.weight.dtype
        state_token = self.state_embedder((self.state_scale * state).flatten(1).to(dtype))
        tokens = torch.cat((state_token[:, None], self.action_embedder(actions.to(dtype))), dim=1)
        tokens = tokens + self.positions.to(tokens.dtype)
        x = to_compute_dtype(tokens + self.timestep_embedder(timesteps)[:, None])
        cos, sin = self._rotation(is_visible, keys_and_values[0][0].shape[-1])
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        mask = torch.cat((is_visible, is_visible.new_ones(x.shape[:2])), dim=1)[:, None, None]
        for block, (key, value) in zip(self.blocks, keys_and_values, strict=True):
            x = block(x, cos, sin, key, value, mask)
        return cast(Tensor, self.action_head(self.norm(x)[:, 1:]).float())

    def observe(self, state: Tensor, images: Tensor, instruction: Tensor) -> Observed:
        """Return the backbone's features that the expert attends to; arguments as in `forward`."""
        return self._read(images, instruction)

    def _read(self, images: Tensor, instruction: Tensor) -> Observed:
        return Observed(*self.backbone.observe(instruction, images))

    def _rotation(self, is_visible: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of state and actions, (batch, 1, horizon + 1, head_dim).

        The positions continue after the text tokens of each row.
        """
        length = is_visible.shape[1] + self.num_tokens
        cos, sin = rotary_table(length, head_dim, self.backbone.settings.rope_theta, is_visible.device)
        positions = is_visible.sum(1, keepdim=True) + torch.arange(self.num_tokens, device=is_visible.device)
        return cos[positions][:, None], sin[positions][:, None]

    def initial_weights(self) -> dict[str, Draw]:
        """Return the initial distributions: the backbone's own, and Xavier-uniform for the expert.

        Embeddings of state and actions, which have few inputs, are N(0, 1 / fan in), so that they are not small
        compared with the embedding of the timestep. The output layer is zero.
        """
        draws: dict[str, Draw] = {f"{_BACKBONE}{name}": draw for name, draw in self._backbone_draws.items()}
        draws["positions"] = Normal(0.02)
        for name, module in self.named_modules():
            if name.startswith(_BACKBONE):
                continue
            if isinstance(module, RMSNorm):
                draws[f"{name}.weight"] = Constant(1.0)
            elif isinstance(module, nn.Linear):
                draws[f"{name}.weight"] = Uniform.xavier(module.in_features, module.out_features)
                if module.bias is not None:
                    draws[f"{name}.bias"] = Constant(0.0)
        for name, embedder in (("state_embedder", self.state_embedder), ("action_embedder", self.action_embedder)):
            draws[f"{name}.weight"] = Normal(embedder.in_features**-0.5)
        return draws | {"action_head.weight": Constant(0.0)}

    def init_weights(self, seed: int | None = None) -> None:
        """Initialize all weights from `initial_weights`; `seed` as in `draw_weights`."""
        draw_weights(self, self.initial_weights(), seed)

    def flops_per_sample(self) -> float:
        """Return the FLOPs of a forward and backward pass over one sample with the longest instruction.

        The sum contains the backbone without its head and without the layers after its last keys and values. For the
        expert it contains 6 N per token, and 12 L H per pair of an expert token and a token that it attends to; N is
        the number of parameters of the expert's matrix products, L the number of layers, and H their width.
        """
        text_length = self.backbone.max_seq_len
        head = self.backbone.model.embed_tokens if self.backbone.lm_head is None else self.backbone.lm_head
        unread = [m.weight for part in _after_keys(self.backbone) for m in part.modules() if isinstance(m, nn.Linear)]
        length = len(self.backbone.stem.positions) + text_length
        backbone = self.backbone.flops_per_sample(text_length) - text_length * matmul_flops([head.weight])
        backbone -= length * (matmul_flops(unread) + 12 * self.positions.shape[1] * length)
        expert = [m.weight for name, m in self.named_modules() if isinstance(m, nn.Linear) and _BACKBONE not in name]
        attention = 12 * len(self.blocks) * self.positions.shape[1] * (length + self.num_tokens)
        return float(backbone + self.num_tokens * (matmul_flops(expert) + attention))

    def output_head(self) -> nn.Module:
        """Return the layer that maps hidden states to actions."""
        return self.action_head


def _after_keys(backbone: PrefixVLM) -> tuple[nn.Module, ...]:
    """Return the layers of the last block that do not affect its keys and values."""
    last = cast(TransformerBlock, backbone.model.layers[-1])
    attention = last.self_attn
    query_norm = () if attention.q_norm is None else (attention.q_norm,)
    return attention.q_proj, *query_norm, attention.o_proj, last.post_attention_layernorm, last.mlp
