"""`model=`: policies."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from foundry.config.schemas.model import Model, PrefixVLM, WidthSettings
from foundry.config.schemas.model.parametrization import BASE_WIDTH
from foundry.config.setting import setting
from foundry.core.errors import Violation

_SIZES = ("state_dim", "num_observations", "horizon", "action_dim")


@dataclass(frozen=True, kw_only=True)
class PolicyDiT(WidthSettings):
    """A diffusion transformer over action chunks, conditioned on the observations of a robot."""

    widths: ClassVar[tuple[str, ...]] = ("num_heads",)
    is_divided: ClassVar[bool] = False
    same_as_data: ClassVar[tuple[str, ...]] = (*Model.same_as_data, *_SIZES)
    wants: ClassVar[frozenset[str]] = frozenset({"actions"})

    _target_: str = "foundry.PolicyDiT"
    state_dim: int = setting("${data.state_dim}", "size of the state", ge=1, le=10**6)
    action_dim: int = setting("${data.action_dim}", "size of an action", ge=1, le=10**6)
    num_observations: int = setting(
        "${data.num_observations}", "number of observations that the model sees", ge=1, le=10**4
    )
    horizon: int = setting("${data.horizon}", "actions per chunk", ge=1, le=10**5)
    image_size: int | None = setting(
        "${data.image_size}",
        "height and width in pixels of the image in each observation; null: no image",
        ge=1,
        le=10**5,
    )
    patch_size: int = setting(8, "actions per token; must divide horizon", ge=1, le=10**5)
    hidden_size: int = setting(128, "width of the residual stream; an even number", ge=2, le=10**6)
    base_width: int = setting(128, BASE_WIDTH, ge=1, le=10**6, since="0.1.0")
    num_layers: int = setting(3, "number of blocks", ge=1, le=1000)
    num_heads: int = setting(4, "attention heads; must divide hidden_size", ge=1, le=10**5)
    mlp_ratio: float = setting(4.0, "feed-forward width divided by hidden_size", gt=0, le=1000)

    def check(self) -> Iterator[Violation]:
        """Check that sizes are divisible as required."""
        yield from super().check()
        if self.horizon % self.patch_size:
            message = f"is {self.patch_size} but must divide the actions of a chunk, data.horizon={self.horizon}"
            yield Violation("model.patch_size", f"{message}; set it to {math.gcd(self.patch_size, self.horizon)}")
        if self.hidden_size % self.num_heads:
            yield Violation(
                "model.num_heads", f"is {self.num_heads} but must divide model.hidden_size={self.hidden_size}"
            )
        if self.hidden_size % 2:
            yield Violation("model.hidden_size", f"is {self.hidden_size} but must be even: sines and cosines")


@dataclass(frozen=True, kw_only=True)
class VLA(Model):
    """An action expert on a vision-language model: a policy that follows instructions in words."""

    language_part: ClassVar[str | None] = "backbone"
    same_as_data: ClassVar[tuple[str, ...]] = (*Model.same_as_data, *_SIZES)
    implies_hparams: ClassVar[str] = "vla"
    wants: ClassVar[frozenset[str]] = frozenset({"actions"})

    _target_: str = "foundry.VLA"
    backbone: PrefixVLM = setting(PrefixVLM, "the vision-language model, whose keys and values the expert attends to")
    state_dim: int = setting("${data.state_dim}", "size of the state", ge=1, le=10**6)
    action_dim: int = setting("${data.action_dim}", "size of an action", ge=1, le=10**6)
    num_observations: int = setting(
        "${data.num_observations}", "number of observations that the model sees", ge=1, le=10**4
    )
    horizon: int = setting("${data.horizon}", "actions per chunk, one token each", ge=1, le=10**5)
    intermediate_size: int = setting(384, "width of the expert's SwiGLU feed-forward", ge=1, le=10**7)
    state_scale: float = setting(
        0.3,
        "factor on the state; below 1, a policy learns from images and instructions before it learns to continue its "
        "current motion",
        ge=0,
        le=1000,
    )

    def check(self) -> Iterator[Violation]:
        """Check the backbone, and that it takes one image per observation."""
        for violation in self.backbone.check():
            yield replace(violation, key=violation.key.replace("model.", "model.backbone.", 1))
        if self.backbone.num_images != self.num_observations:
            message = f"is {self.backbone.num_images} but must be data.num_observations={self.num_observations}"
            yield Violation("model.backbone.num_images", f"{message}; leave it out to follow the data")
