"""`objective=`: the loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from foundry.config.setting import setting
from foundry.core.errors import Violation
from foundry.core.moved_modules import find_moved

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

__getattr__ = find_moved(__name__)


@dataclass(frozen=True, kw_only=True)
class TextSampling:
    """Options of `foundry.sample` for text; null leaves an option to the objective."""

    prompt: str | None = setting(None, "text to continue; for a run on conversations, the user's message")
    prompts: list[str] | None = setting(None, "several prompts, such as \"['a','b']\"")
    max_new_tokens: int | None = setting(None, "maximum number of new tokens", ge=1)
    temperature: float | None = setting(None, "sampling temperature; 0: the most likely token", ge=0)
    top_k: int | None = setting(None, "sample from this number of most likely tokens", ge=1)
    top_p: float | None = setting(
        None, "sample from the fewest most likely tokens whose probabilities sum up to this, after top_k", gt=0, le=1
    )
    stop: list[str] | None = setting(
        None, "tokens that end a text, such as '<|im_end|>'; null: the end tokens of the run"
    )
    chat: bool | None = setting(None, "apply the run's chat template, if any, to the prompts; null: true")
    image: str | None = setting(None, "image file that the prompts are about, for a vision-language model")


@dataclass(frozen=True, kw_only=True)
class ImageSampling:
    """Options of `foundry.sample` for images; null leaves an option to the objective."""

    labels: list[int] | None = setting(None, "classes to generate, one image each, such as [3,1,4]")
    samples_per_class: int | None = setting(None, "images per class", ge=1)
    guidance_scale: float | None = setting(None, "scale of classifier-free guidance; 1: no guidance", ge=0)
    steps: int | None = setting(None, "denoising steps", ge=1)


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """Cross-entropy of the next token."""

    sampling: ClassVar[type[TextSampling]] = TextSampling

    wants: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences"})
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are computed in addition to the loss."""
        return ("cross_entropy", "z_loss") if self.z_loss_coefficient else ()

    _target_: str = "foundry.NextToken"
    z_loss_coefficient: float = setting(
        "${hparams.z_loss_coefficient}",
        "weight of the squared log-sum-exp of the logits, averaged like the cross-entropy",
        ge=0,
        alone=0.0,
    )
    sample_tokens: int = setting(160, "length of a text sample in tokens", ge=1, le=10**8)
    temperature: float = setting(0.8, "sampling temperature of text samples; 0: the most likely token", ge=0)


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Supervised fine-tuning: cross-entropy of the assistant's answers."""

    sampling: ClassVar[type[TextSampling]] = TextSampling

    implies_hparams: ClassVar[str] = "sft"
    wants: ClassVar[frozenset[str]] = frozenset({"completions"})
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are computed in addition to the loss."""
        return ("accuracy", "cross_entropy", "z_loss") if self.z_loss_coefficient else ("accuracy",)

    _target_: str = "foundry.SFT"
    z_loss_coefficient: float = setting(
        "${hparams.z_loss_coefficient}",
        "weight of the squared log-sum-exp of the logits, averaged like the cross-entropy",
        ge=0,
        alone=0.0,
    )
    sft_average_log_probs: bool = setting(
        False,
        "average the loss over the answer tokens of each sample first, so that long and short answers have equal "
        "weight",
    )
    hidden_dropout: float | None = setting(
        None,
        "dropout probability of the outputs that attention and feed-forward add to the hidden states; null: the "
        "model's value; 0: no dropout",
        ge=0,
        lt=1,
    )
    attention_dropout: float | None = setting(
        None, "dropout probability of attention weights; null: the model's value; 0: no dropout", ge=0, lt=1
    )
    seed: int = setting("${hparams.seed}", "seed of dropout", ge=0, alone=0)
    sample_tokens: int = setting(160, "maximum length of the answer in a text sample, in tokens", ge=1, le=10**8)
    temperature: float = setting(0.0, "sampling temperature of text samples; 0: the most likely token", ge=0)

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that attention dropout is not combined with tensor parallelism: dropout masks are for whole layers."""
        size = run.distributed.tensor_parallel
        if size > 1 and self.attention_dropout:
            message = f"is {self.attention_dropout:g}, which is not supported with distributed.tensor_parallel"
            yield Violation("objective.attention_dropout", f"{message}={size}; set it to 0")


class Prediction(Enum):
    """Prediction target of a diffusion model."""

    epsilon = "epsilon"
    v_prediction = "v_prediction"
    sample = "sample"


class BetaSchedule(Enum):
    """Noise schedule, with the names of diffusers."""

    linear = "linear"
    scaled_linear = "scaled_linear"
    squaredcos_cap_v2 = "squaredcos_cap_v2"


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """Mean squared error of the predicted noise or velocity, with classifier-free guidance in sampling."""

    sampling: ClassVar[type[ImageSampling]] = ImageSampling

    implies_hparams: ClassVar[str] = "diffusion"
    wants: ClassVar[frozenset[str]] = frozenset({"images", "labels"})
    loss_functions: ClassVar[tuple[str, ...]] = ("mse",)
    metrics: ClassVar[tuple[str, ...]] = ()

    _target_: str = "foundry.Diffusion"
    seed: int = setting("${hparams.seed}", "seed of noise, timesteps and dropped conditions", ge=0, alone=0)
    num_classes: int = setting(
        "${data.num_classes}", "number of classes of the data; the next label means no class", ge=1, le=10**8
    )
    prediction: Prediction = setting(
        Prediction.v_prediction, "prediction target: epsilon: the noise; v_prediction: the velocity; sample: the image"
    )
    num_train_timesteps: int = setting(1000, "timesteps of the noise schedule", ge=1, le=10**6)
    beta_schedule: BetaSchedule = setting(
        BetaSchedule.squaredcos_cap_v2, "noise schedule: squaredcos_cap_v2 (the cosine), linear or scaled_linear"
    )
    condition_dropout: float = setting(0.1, "fraction of samples trained without their class, for guidance", ge=0, le=1)
    guidance_scale: float = setting(2.0, "scale of classifier-free guidance in sampling; 1: no guidance", ge=0)
    sampling_steps: int = setting(50, "denoising steps in sampling", ge=1, le=10**6)
    samples_per_class: int = setting(8, "images per class in a sample grid", ge=1, le=10**5)

    def check(self) -> Iterator[Violation]:
        """Check that sampling uses at most the timesteps of the noise schedule."""
        yield from check_sampling_steps(self.sampling_steps, self.num_train_timesteps)


def check_sampling_steps(steps: int, timesteps: int) -> Iterator[Violation]:
    """Check that the denoising steps of sampling are at most the timesteps of the noise schedule."""
    if steps > timesteps:
        message = f"is {steps} but must be at most objective.num_train_timesteps={timesteps}"
        yield Violation("objective.sampling_steps", message)
