"""Diffusion transformer over the next actions of a robot."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry.config.configured import configured_by
from foundry.core.errors import ConfigError
from foundry.models.dit import DiTBlock, FinalLayer, TimestepEmbedder, linear_draws, linear_flops, sinusoids
from foundry.models.flops import matmul_flops
from foundry.models.initialisation import draw_weights
from foundry.models.keyed_draws import Constant, Draw, Uniform
from foundry.models.parametrization import WidthRules, find_roles
from foundry.tasks.robots.schemas.model import PolicyDiT as PolicyDiTSettings

_KEYPOINTS = 32
"""Number of keypoints that describe an image, with two coordinates each."""
_CHANNELS = (32, 64, 64)
"""Channels of the strided convolutions before the keypoints."""
_SHARPNESS = 4.0
"""Inverse temperature of the spatial softmax.

With 1, a new network, whose features are small, has all keypoints near the center.
"""


class PictureEncoder(nn.Module):
    """Strided convolutions and a spatial softmax (Levine et al., 2016, section 4.1), which locate features."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = _CHANNELS
        self.conv1 = nn.Conv2d(3, first, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(first, second, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(second, third, 3, stride=2, padding=1)
        self.keypoints = nn.Conv2d(third, _KEYPOINTS, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 3, height, width) uint8 to coordinates (batch, 2 * keypoints) float32, from -2 to 2."""
        # Scale from 0..255 to [-1, 1].
        x = (images.float() / 127.5 - 1.0).to(self.conv1.weight.dtype)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.gelu(conv(x))
        # In fp32, because each coordinate of a keypoint is a mean over all positions.
        features = self.keypoints(x).float()
        chances = (_SHARPNESS * features.flatten(2)).softmax(-1).view_as(features)
        rows = torch.linspace(-2, 2, features.shape[2], device=features.device)
        columns = torch.linspace(-2, 2, features.shape[3], device=features.device)
        return torch.cat(((chances.sum(3) * rows).sum(2), (chances.sum(2) * columns).sum(2)), dim=-1)

    def flops(self, image_size: int) -> float:
        """Return the FLOPs of a forward and backward pass over one image of height and width `image_size`."""
        size, total = image_size, 0
        for conv in (self.conv1, self.conv2, self.conv3, self.keypoints):
            size = -(-size // conv.stride[0])
            total += size**2 * matmul_flops([conv.weight])
        return float(total)


class PolicyDiT(nn.Module):
    """`DiT` blocks over tokens of a few actions each, conditioned on observations.

    The last observation is the current one.

    Raises:
        ConfigError: if the sizes are not divisible as required.
    """

    @configured_by(PolicyDiTSettings)
    def __init__(self, settings: PolicyDiTSettings) -> None:
        super().__init__()
        if violations := list(settings.check()):
            raise ConfigError(violations)
        hidden_size, token_size = settings.hidden_size, settings.patch_size * settings.action_dim
        self.num_tokens, self.hidden_size = settings.horizon // settings.patch_size, hidden_size
        self.num_observations, self.image_size = settings.num_observations, settings.image_size
        seen = settings.state_dim if self.image_size is None else settings.state_dim + 2 * _KEYPOINTS
        self.picture_encoder = None if self.image_size is None else PictureEncoder()
        self.observation_embedder = nn.Sequential(
            nn.Linear(self.num_observations * seen, 2 * hidden_size), nn.SiLU(), nn.Linear(2 * hidden_size, hidden_size)
        )
        self.timestep_embedder = TimestepEmbedder(hidden_size)
        self.action_embedder = nn.Linear(token_size, hidden_size)
        self.blocks = nn.ModuleList(
            DiTBlock(hidden_size, settings.num_heads, settings.mlp_ratio) for _ in range(settings.num_layers)
        )
        self.final_layer = FinalLayer(hidden_size, token_size)
        inputs = ("action_embedder", "timestep_embedder.fc1", "observation_embedder.0")
        roles = find_roles(self, inputs=inputs, outputs=("final_layer.out",))
        self._width_rules = WidthRules(settings.width_ratio, roles)
        self.init_weights()

    def forward(
        self,
        actions: Tensor,
        timesteps: Tensor,
        state: Tensor,
        images: Tensor | None = None,
        *,
        observed: Tensor | None = None,
    ) -> Tensor:
        """Predict the target of the objective from noisy actions: the clean actions, their noise or their velocity.

        Args:
            actions: (batch, horizon, action_dim) float32.
            timesteps: (batch,) float32.
            state: (batch, num_observations, state_dim) float32.
            images: (batch, num_observations, 3, image_size, image_size) uint8; None if the model uses no images.
            observed: result of `observe` for these observations; None computes it here.

        Returns:
            (batch, horizon, action_dim) float32.
        """
        condition = self.timestep_embedder(timesteps) + (self._embed(state, images) if observed is None else observed)
        # The residual stream has the tokens' dtype: bf16 under autocast with fp32 weights, as with FSDP2's bf16
        # weights.
        tokens = actions.reshape(len(actions), self.num_tokens, -1)
        x = self.action_embedder(tokens.to(self.action_embedder.weight.dtype))
        x = x + sinusoids(torch.arange(self.num_tokens, device=x.device), self.hidden_size).to(x.dtype)
        for block in self.blocks:
            x = block(x, condition)
        return cast(Tensor, self.final_layer(x, condition).reshape(actions.shape).float())

    def observe(self, state: Tensor, images: Tensor | None = None) -> Tensor:
        """Return the embedding of state and images, (batch, hidden_size); arguments as in `forward`."""
        return self._embed(state, images)

    def _embed(self, state: Tensor, images: Tensor | None) -> Tensor:
        seen = state
        if self.picture_encoder is not None:
            assert images is not None, "the picture encoder needs images"
            seen = torch.cat((state, self.picture_encoder(images.flatten(0, 1)).unflatten(0, state.shape[:2])), dim=-1)
        dtype = cast(nn.Linear, self.observation_embedder[0]).weight.dtype
        return cast(Tensor, self.observation_embedder(seen.flatten(1).to(dtype)))

    def initial_weights(self) -> dict[str, Draw]:
        """Return the initial distributions: Xavier-uniform, also for convolutions.

        The weights of gates and of the output layer are zero, as in DiT.
        """
        draws = linear_draws(self, self._width_rules)
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d):
                area = module.kernel_size[0] * module.kernel_size[1]
                draws[f"{name}.weight"] = Uniform.xavier(area * module.in_channels, area * module.out_channels)
                draws[f"{name}.bias"] = Constant(0.0)
        return draws

    def width_rules(self) -> WidthRules:
        """Return the factors on initial values and learning rates by parameter name."""
        return self._width_rules

    def init_weights(self, seed: int | None = None) -> None:
        """Initialize all weights from `initial_weights`; `seed` as in `draw_weights`."""
        draw_weights(self, self.initial_weights(), seed)

    def flops_per_sample(self) -> float:
        """Return the FLOPs of a forward and backward pass over one sample.

        They are 6 (T N + C + 2 L T² H), plus the FLOPs of the images. T is the number of tokens, N the number of
        parameters of matrix products applied to each token, C of those applied once to the sample's condition, L the
        number of layers, and H hidden_size.
        """
        products = linear_flops(self, self.num_tokens, ("timestep_embedder", "observation_embedder"))
        attention = 2 * len(self.blocks) * self.num_tokens**2 * self.hidden_size
        pictures = 0.0
        if self.picture_encoder is not None and self.image_size is not None:
            pictures = self.num_observations * self.picture_encoder.flops(self.image_size)
        return products + float(6 * attention) + pictures

    def output_head(self) -> nn.Module:
        """Return the layer that maps hidden states to actions."""
        return self.final_layer
