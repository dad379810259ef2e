"""`objective=`: the loss."""

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
    """Options of `foundry.sample` for images; null uses the objective's setting."""

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
    """Direct preference optimisation: makes chosen responses more likely than rejected ones."""

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
        "β: strength of the pull toward the reference model, which has the initial weights of the run",
        gt=0,
    )
    loss_type: PreferenceLoss = setting(
        PreferenceLoss.sigmoid, "loss as a function of the margin between the responses: sigmoid, ipo or hinge"
    )
    label_smoothing: float = setting(0.0, "assumed fraction of pairs whose order is wrong", ge=0, lt=0.5)
    preference_loss_weight: float = setting(1.0, "weight of the preference loss", ge=0)
    sft_loss_weight: float = setting(
        0.0,
        "weight of the negative log-probability of the chosen response, which otherwise can become less likely",
        ge=0,
    )
    preference_average_log_probs: bool = setting(
        False, "divide log-ratios by the length of the response; intended for loss_type=ipo"
    )
    sft_average_log_probs: bool = setting(
        False,
        "divide the negative log-probability by the length of the response, so that all responses have equal weight",
    )
    reference: Reference = setting(
        Reference.auto,
        "reference model: cached: log-probabilities of all pairs, computed once before the first step; copy: a "
        "second model, evaluated at each step; adapters_off: the model with its adapters disabled; auto: "
        "adapters_off with adapters, else cached",
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
    """Divergence from a teacher's next-token distribution, on tokens of the data or of the student's completions."""

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
    """Group-relative policy optimisation: makes completions with above-average rewards in their group more likely."""

    brings_hparams: ClassVar[str] = "grpo"

    _target_: str = "foundry.GRPO"


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """Mean squared error of the predicted noise or velocity, with classifier-free guidance in sampling."""

    sampling: ClassVar[type[ImageSampling]] = ImageSampling

    brings_hparams: ClassVar[str] = "diffusion"
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
