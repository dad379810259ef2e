"""`objective=`: loss, its metrics and the generation of samples."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from foundry.config.schemas.distillation import DistillationMode, Teaching
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.policy import PolicyGradient
from foundry.config.schemas.rollouts import Rollouts
from foundry.config.setting import check_unused, setting
from foundry.core.errors import Violation

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


@dataclass(frozen=True, kw_only=True)
class TextSampling:
    """Options of `foundry.sample` for text; null uses the objective's setting."""

    prompt: str | None = setting(None, "text to continue; of a run over chats what the user says")
    prompts: list[str] | None = setting(None, "several of them, such as \"['a','b']\"")
    max_new_tokens: int | None = setting(None, "tokens to add at most", ge=1)
    temperature: float | None = setting(None, "of the sampled tokens; 0 picks the likeliest", ge=0)
    top_k: int | None = setting(None, "draw from so many of the likeliest tokens", ge=1)
    top_p: float | None = setting(
        None, "draw from the fewest tokens whose probabilities sum up to this, after top_k", gt=0, le=1
    )
    stop: list[str] | None = setting(None, "tokens that end a text, such as '<|im_end|>'; null: the run's own")
    chat: bool | None = setting(None, "put prompts into the run's chat template, where it has one; null: true")
    image: str | None = setting(None, "file of the picture that the prompts are about, for a model that looks at one")


@dataclass(frozen=True, kw_only=True)
class ImageSampling:
    """Options of `foundry.sample` for images; null uses the objective's setting."""

    labels: list[int] | None = setting(None, "classes to draw, one picture each, such as [3,1,4]")
    samples_per_class: int | None = setting(None, "pictures of each class", ge=1)
    guidance_scale: float | None = setting(None, "classifier-free guidance; 1: none", ge=0)
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
        "weight of the squared log-sum-exp of the logits, averaged as the cross-entropy is",
        ge=0,
        alone=0.0,
    )
    sample_tokens: int = setting(160, "length of a text sample in tokens", ge=1, le=10**8)
    temperature: float = setting(0.8, "of a text sample; 0 picks the likeliest token", ge=0)


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Cross-entropy of answers: supervised fine-tuning."""

    sampling: ClassVar[type[TextSampling]] = TextSampling

    brings_hparams: ClassVar[str] = "sft"
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
        "weight of the squared log-sum-exp of the logits, averaged as the cross-entropy is",
        ge=0,
        alone=0.0,
    )
    sft_average_log_probs: bool = setting(
        False, "average over each sample's answer tokens first, so that long and short ones weigh the same"
    )
    hidden_dropout: float | None = setting(
        None,
        "share dropped of what attention and feed-forward add to the hidden states; null: the model's own; 0: none",
        ge=0,
        lt=1,
    )
    attention_dropout: float | None = setting(
        None, "share dropped of attention weights; null: the model's own; 0: none", ge=0, lt=1
    )
    seed: int = setting("${hparams.seed}", "seed of dropout", ge=0, alone=0)
    sample_tokens: int = setting(160, "longest answer of a text sample in tokens", ge=1, le=10**8)
    temperature: float = setting(0.0, "of a text sample; 0 picks the likeliest token", ge=0)

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that attention dropout is not combined with tensor parallelism: its masks are for whole layers."""
        size = run.distributed.tensor_parallel
        if size > 1 and self.attention_dropout:
            message = f"is {self.attention_dropout:g} but is drawn for whole layers, which distributed.tensor_parallel"
            yield Violation("objective.attention_dropout", f"{message}={size} divides; set it to 0")


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


class PreferenceLoss(Enum):
    """Loss as a function of the margin between the chosen and the rejected response."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"


class Reference(Enum):
    """Implementation of the reference model, which has the initial weights of the run.

    Attributes:
        auto: adapters_off with adapters, otherwise cached.
        cached: two log-probabilities per pair, computed once before the first step and stored in the run directory.
        copy: a second model in memory, evaluated at each step.
        adapters_off: the model itself with its adapters disabled, evaluated at each step.
    """

    auto = "auto"
    cached = "cached"
    copy = "copy"
    adapters_off = "adapters_off"


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimisation: chosen responses become likelier than rejected ones."""

    brings_hparams: ClassVar[str] = "dpo"
    wants: ClassVar[frozenset[str]] = frozenset({"pairs"})
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    metrics: ClassVar[tuple[str, ...]] = (
        "preference_loss",
        "sft_loss",
        "accuracy",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_log_prob",
    )

    _target_: str = "foundry.DPO"
    ref_policy_kl_penalty: float = setting(
        0.05,
        "β: how strongly the model is held to its reference, the model with which the run starts",
        gt=0,
    )
    loss_type: PreferenceLoss = setting(
        PreferenceLoss.sigmoid, "what is made of the margin between the responses: sigmoid, ipo or hinge"
    )
    label_smoothing: float = setting(0.0, "share of pairs whose order is taken to be wrong", ge=0, lt=0.5)
    preference_loss_weight: float = setting(1.0, "weight of the preference loss", ge=0)
    sft_loss_weight: float = setting(
        0.0, "weight of the negative log-probability of the chosen response, which else may become less likely", ge=0
    )
    preference_average_log_probs: bool = setting(
        False, "divide log-ratios by the length of their response; meant for loss_type=ipo"
    )
    sft_average_log_probs: bool = setting(
        False, "divide the negative log-probability by the length of the response, so that all weigh the same"
    )
    reference: Reference = setting(
        Reference.auto,
        "what to compare with: cached: log-probabilities of all pairs are computed once before the first step; "
        "copy: a second model is asked at each step; adapters_off: the model without its adapters; auto: adapters_off "
        "with adapters, else cached",
    )

    def check(self) -> Iterator[Violation]:
        """Check that the loss has a term with a nonzero weight."""
        if self.preference_loss_weight == self.sft_loss_weight == 0:
            message = "is 0 and so is objective.sft_loss_weight; give one of them a weight"
            yield Violation("objective.preference_loss_weight", message)

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that reference=adapters_off is used with adapters."""
        if self.reference is Reference.adapters_off and not isinstance(run.peft, LoRA):
            message = "is adapters_off but peft=none trains the model itself; choose cached or copy, or peft=lora"
            yield Violation("objective.reference", message)


@dataclass(frozen=True, kw_only=True)
class Distillation(Rollouts, Teaching):
    """A teacher's next-token distribution, at the tokens of the data or at those that the student draws itself."""

    brings_hparams: ClassVar[str] = "distillation"
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)

    _target_: str = "foundry.Distillation"

    @property
    def generates(self) -> bool:
        """True if the student trains on its own completions."""
        return self.mode is DistillationMode.on_policy

    @property
    def described(self) -> str:
        """Name of the objective in messages."""
        return f"Distillation with mode={self.mode.value}"

    @property
    def wants(self) -> frozenset[str]:
        """Required contents of a sample."""
        return frozenset({"prompts"} if self.generates else {"tokens", "sequences"})

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are computed in addition to the loss."""
        return ("entropy" if self.generates else "cross_entropy", "divergence")

    def check(self) -> Iterator[Violation]:
        """Check that updates divide a rollout, and that no setting would be ignored."""
        yield from self.check_teaching()
        if self.generates:
            yield from self.check_rollout()
        else:
            names = [item.name for item in fields(Rollouts)]
            yield from check_unused(self, "objective", names, "objective.mode=on_policy")


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation: the model's own answers that are better than others become likelier."""

    brings_hparams: ClassVar[str] = "grpo"

    _target_: str = "foundry.GRPO"


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """Mean squared error of the predicted noise or velocity, with classifier-free guidance when drawing."""

    sampling: ClassVar[type[ImageSampling]] = ImageSampling

    brings_hparams: ClassVar[str] = "diffusion"
    wants: ClassVar[frozenset[str]] = frozenset({"images", "labels"})
    loss_functions: ClassVar[tuple[str, ...]] = ("mse",)
    metrics: ClassVar[tuple[str, ...]] = ()

    _target_: str = "foundry.Diffusion"
    seed: int = setting("${hparams.seed}", "seed of noise, timesteps and dropped conditions", ge=0, alone=0)
    num_classes: int = setting(
        "${data.num_classes}", "classes of the data; the next label stands for no class", ge=1, le=10**8
    )
    prediction: Prediction = setting(
        Prediction.v_prediction, "epsilon: the noise; v_prediction: the velocity; sample: the image"
    )
    num_train_timesteps: int = setting(1000, "timesteps of the noise schedule", ge=1, le=10**6)
    beta_schedule: BetaSchedule = setting(
        BetaSchedule.squaredcos_cap_v2, "noise schedule: squaredcos_cap_v2 (the cosine), linear or scaled_linear"
    )
    condition_dropout: float = setting(0.1, "share of samples trained without their class, for guidance", ge=0, le=1)
    guidance_scale: float = setting(2.0, "classifier-free guidance when drawing; 1: none", ge=0)
    sampling_steps: int = setting(50, "denoising steps when drawing", ge=1, le=10**6)
    samples_per_class: int = setting(8, "images of each class in a sample grid", ge=1, le=10**5)

    def check(self) -> Iterator[Violation]:
        """Check that sampling uses at most the timesteps of the noise schedule."""
        yield from check_sampling_steps(self.sampling_steps, self.num_train_timesteps)


def check_sampling_steps(steps: int, timesteps: int) -> Iterator[Violation]:
    """Check that the denoising steps of sampling are at most the timesteps of the noise schedule."""
    if steps > timesteps:
        message = f"is {steps} but must be at most objective.num_train_timesteps={timesteps}"
        yield Violation("objective.sampling_steps", message)
