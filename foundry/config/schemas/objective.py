"""`objective=`: what is minimised."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar

from foundry.config.errors import Violation
from foundry.config.schemas.policy import PolicyGradient
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class TextSampling:
    """What `foundry.sample` takes for text; null: what the objective says."""

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


@dataclass(frozen=True, kw_only=True)
class ImageSampling:
    """What `foundry.sample` takes for pictures; null: what the objective says."""

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
        """What is measured besides the loss."""
        return ("cross_entropy", "z_loss") if self.z_loss_coefficient else ()

    _target_: str = "foundry.objectives.next_token.NextToken"
    z_loss_coefficient: float = setting("${hparams.z_loss_coefficient}", "weight of the z-loss", ge=0)
    sample_tokens: int = setting(160, "length of a text sample in tokens", ge=1, le=10**8, aliases="max_new_tokens")
    temperature: float = setting(0.8, "of a text sample; 0 picks the likeliest token", ge=0)


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Cross-entropy of answers: supervised fine-tuning."""

    sampling: ClassVar[type[TextSampling]] = TextSampling

    wants: ClassVar[frozenset[str]] = frozenset({"completions"})
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured besides the loss."""
        return ("accuracy", "cross_entropy", "z_loss") if self.z_loss_coefficient else ("accuracy",)

    _target_: str = "foundry.objectives.sft.SFT"
    z_loss_coefficient: float = setting("${hparams.z_loss_coefficient}", "weight of the z-loss", ge=0)
    sft_average_log_probs: bool = setting(
        False, "average over each sample's answer tokens first, so that long and short ones weigh the same"
    )
    hidden_dropout: float | None = setting(
        None,
        "share dropped of what attention and feed-forward add to the hidden states; null: the model's own; 0: none",
        ge=0,
        lt=1,
        aliases="resid_pdrop, residual_dropout",
    )
    attention_dropout: float | None = setting(
        None, "share dropped of attention weights; null: the model's own; 0: none", ge=0, lt=1, aliases="attn_pdrop"
    )
    seed: int = setting("${hparams.seed}", "seed of dropout", ge=0)
    sample_tokens: int = setting(160, "longest answer of a text sample in tokens", ge=1, le=10**8)
    temperature: float = setting(0.0, "of a text sample; 0 picks the likeliest token", ge=0)


class Prediction(Enum):
    """What a diffusion model predicts."""

    epsilon = "epsilon"
    v_prediction = "v_prediction"


class BetaSchedule(Enum):
    """How noise grows over the timesteps, by diffusers' names."""

    linear = "linear"
    scaled_linear = "scaled_linear"
    squaredcos_cap_v2 = "squaredcos_cap_v2"


class PreferenceLoss(Enum):
    """What is made of the margin between a chosen and a rejected response."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"


class Reference(Enum):
    """What a policy is compared with, which always has the weights with which the run started.

    Attributes:
        auto: adapters_off with adapters, else cached.
        cached: two numbers for each pair, computed once before the first step and kept in the run directory.
        copy: a second model in memory, asked at each step.
        adapters_off: the model itself without its adapters, asked at each step.
    """

    auto = "auto"
    cached = "cached"
    copy = "copy"
    adapters_off = "adapters_off"


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimisation: chosen responses become likelier than rejected ones."""

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

    _target_: str = "foundry.objectives.dpo.DPO"
    ref_policy_kl_penalty: float = setting(
        0.05,
        "β: how strongly the model is held to its reference, the model with which the run starts",
        gt=0,
        aliases="beta",
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
        """There is something to minimise."""
        if self.preference_loss_weight == self.sft_loss_weight == 0:
            message = "is 0 and so is objective.sft_loss_weight; give one of them a weight"
            yield Violation("objective.preference_loss_weight", message)


class Divergence(Enum):
    """How two distributions of the next token are compared."""

    forward = "forward"
    reverse = "reverse"
    mixed = "mixed"
    jsd = "jsd"


class OutsideTopK(Enum):
    """What becomes of the tokens that are not among the teacher's likeliest.

    Attributes:
        tail: all of them are one more entry of both distributions.
        renormalize: they are left out of both.
        zero: the teacher gives them nothing, and the student what it gives.
    """

    tail = "tail"
    renormalize = "renormalize"
    zero = "zero"


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Cross-entropy of the targets, and the divergence from a teacher's next-token distribution."""

    wants: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences"})
    takes_packed: ClassVar[bool] = True
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    metrics: ClassVar[tuple[str, ...]] = ("cross_entropy", "divergence")

    _target_: str = "foundry.objectives.distillation.Distillation"
    teacher: str = setting(
        "???",
        "run directory, or folder of transformers, of the model to learn from",
        path=True,
        aliases="teacher_model, teacher_model_name_or_path",
    )
    teacher_which: str = setting("last", "checkpoint of that run: last, best, or the number of a step")
    teacher_trust: bool = setting(False, "build a model that the run names and foundry does not know: it runs its code")
    vocab_size: int = setting("${model.vocab_size}", "entries of the student, which the teacher must have too", ge=1)
    max_seq_len: int = setting("${model.max_seq_len}", "longest sequence in tokens", ge=1)
    divergence: Divergence = setting(
        Divergence.forward,
        "forward: KL(teacher || student); reverse: KL(student || teacher); mixed: both, weighted; or jsd",
        aliases="kl_type",
    )
    mixed_kl_weight: float = setting(0.5, "share of forward in mixed", ge=0, le=1)
    jsd_beta: float = setting(0.5, "weight of the teacher in the mixture of jsd", gt=0, lt=1)
    temperature: float = setting(
        1.0,
        "both models' logits are divided by it; the divergence is multiplied by its square",
        gt=0,
    )
    ce_ratio: float = setting(
        0.5, "share of the cross-entropy in the loss; the divergence has the rest", ge=0, le=1, aliases="alpha"
    )
    top_k: int | None = setting(
        None,
        "compare the teacher's likeliest tokens only, which saves memory",
        ge=1,
        aliases="topk_logits_k",
    )
    outside_top_k: OutsideTopK = setting(
        OutsideTopK.tail,
        "the other tokens: tail: one entry together; renormalize: left out; zero: nothing for the teacher only",
        aliases="zero_outside_topk",
    )

    def check(self) -> Iterator[Violation]:
        """No setting would be ignored."""
        defaults = {item.name: item.default for item in fields(self)}
        for name, needed, is_used in (
            ("mixed_kl_weight", "objective.divergence=mixed", self.divergence is Divergence.mixed),
            ("jsd_beta", "objective.divergence=jsd", self.divergence is Divergence.jsd),
            ("outside_top_k", "objective.top_k", self.top_k is not None),
        ):
            value = getattr(self, name)
            if not is_used and value != defaults[name]:
                message = f"is {value.value if isinstance(value, Enum) else value} but means nothing without {needed}"
                yield Violation(f"objective.{name}", message)


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation: the model's own answers that are better than others become likelier."""

    _target_: str = "foundry.objectives.grpo.GRPO"


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """Mean squared error of the predicted noise or velocity, with classifier-free guidance when drawing."""

    sampling: ClassVar[type[ImageSampling]] = ImageSampling

    wants: ClassVar[frozenset[str]] = frozenset({"images", "labels"})
    loss_functions: ClassVar[tuple[str, ...]] = ("mse",)
    metrics: ClassVar[tuple[str, ...]] = ()

    _target_: str = "foundry.objectives.diffusion.Diffusion"
    seed: int = setting("${hparams.seed}", "seed of noise, timesteps and dropped conditions", ge=0)
    num_classes: int = setting(
        "${data.num_classes}", "classes of the data; the next label stands for no class", ge=1, le=10**8
    )
    prediction: Prediction = setting(Prediction.v_prediction, "epsilon: the noise; v_prediction: the velocity")
    num_train_timesteps: int = setting(1000, "timesteps of the noise schedule", ge=1, le=10**6)
    beta_schedule: BetaSchedule = setting(
        BetaSchedule.squaredcos_cap_v2, "noise schedule: squaredcos_cap_v2 (the cosine), linear or scaled_linear"
    )
    condition_dropout: float = setting(0.1, "share of samples trained without their class, for guidance", ge=0, le=1)
    guidance_scale: float = setting(2.0, "classifier-free guidance when drawing; 1: none", ge=0)
    sampling_steps: int = setting(50, "denoising steps when drawing", ge=1, le=10**6, aliases="num_inference_steps")
    samples_per_class: int = setting(8, "images of each class in a sample grid", ge=1, le=10**5)

    def check(self) -> Iterator[Violation]:
        """Say where drawing asks for more than the noise schedule has."""
        if self.sampling_steps > self.num_train_timesteps:
            yield Violation(
                "objective.sampling_steps",
                f"is {self.sampling_steps} but must be at most "
                f"objective.num_train_timesteps={self.num_train_timesteps}",
            )
