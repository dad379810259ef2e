"""`optimizer=`: the optimizer, with weight decay and learning rate by parameter group."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from foundry.config.schemas.precision import PrecisionMode
from foundry.config.setting import check_fields, check_unused, setting
from foundry.core.duration import Budget, Duration
from foundry.core.errors import Violation, nearest

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

_BF16_STEP = 2.0**-8
"""Relative precision of bf16: smaller relative changes are lost in rounding."""


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings of the optimizer for a group of parameters."""

    lr_mult: float = setting(1.0, "factor on the learning rate, in all phases of the schedule", ge=0)
    wd_mult: float | None = setting(
        None, "factor on the weight decay; null: 1 for matrices, 0 for biases, norms and other vectors", ge=0
    )
    beta1: float | None = setting(
        None, "decay of the first moment of Adam or AdamW; null: optimizer.beta1", ge=0, lt=1, since="0.1.0"
    )
    beta2: float | None = setting(
        None, "decay of the second moment of Adam or AdamW; null: optimizer.beta2", ge=0, lt=1, since="0.1.0"
    )


@dataclass(frozen=True, kw_only=True)
class Matched(GroupSettings):
    """Settings for parameters selected by name."""

    match: str = setting("", "regular expression to search for in parameter names", parse=_pattern)


_BETAS = ("beta1", "beta2")


def _is_number(name: str, mapping: Mapping[str, Any]) -> bool:
    """Return whether a setting of a group is missing, a number or, except for `lr_mult`, null."""
    value = mapping.get(name, 1.0)
    return (value is None and name != "lr_mult") or (isinstance(value, (int, float)) and not isinstance(value, bool))


@dataclass(frozen=True, kw_only=True)
class ParamGroups:
    """Parameter groups with their own settings."""

    embeddings: GroupSettings = field(default_factory=GroupSettings)
    head: GroupSettings = field(default_factory=GroupSettings)
    patterns: dict[str, Any] = setting(
        dict, "further groups by name: mappings of match (a regular expression), lr_mult, wd_mult, beta1 and beta2"
    )

    def check(self) -> Iterator[Violation]:
        """Check the mappings in `patterns`."""
        for name, mapping in self.patterns.items():
            key = f"optimizer.groups.patterns.{name}"
            names = [item.name for item in fields(Matched)]
            if not isinstance(mapping, dict) or "match" not in mapping:
                yield Violation(key, f"is {mapping} but must be a mapping such as {{match: norm, lr_mult: 0.5}}")
            elif unknown := [name for name in mapping if name not in names]:
                yield Violation(f"{key}.{unknown[0]}", f"is not a key of a group{nearest(str(unknown[0]), names)}")
            elif not isinstance(mapping["match"], str) or not mapping["match"]:
                yield Violation(
                    f"{key}.match", f"is {mapping['match']!r} but must be a string found in parameter names"
                )
            elif wrong := [name for name in names if name != "match" and not _is_number(name, mapping)]:
                yield Violation(f"{key}.{wrong[0]}", f"is {mapping[wrong[0]]} but must be a number")
            else:
                yield from check_fields(Matched(**mapping), key)

    def betas(self) -> Iterator[tuple[str, float]]:
        """Return the keys and values of all decays that groups set."""
        groups = {"embeddings": asdict(self.embeddings), "head": asdict(self.head)}
        groups |= {f"patterns.{name}": mapping for name, mapping in self.patterns.items() if isinstance(mapping, dict)}
        for name, mapping in groups.items():
            for beta in _BETAS:
                if mapping.get(beta) is not None and _is_number(beta, mapping):
                    yield f"optimizer.groups.{name}.{beta}", mapping[beta]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base class of optimizer settings. The learning rate is `hparams.lr`, scheduled by `scheduler`."""

    _target_: str
    weight_decay: float = setting(0.01, "weight decay of matrices; biases, norms and other vectors are exempt", ge=0)
    groups: ParamGroups = field(default_factory=ParamGroups)

    def check(self) -> Iterator[Violation]:
        """Check the parameter groups."""
        yield from self.groups.check()


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam; its weight decay is an L2 term added to the gradient."""

    _target_: str = "foundry.optimizers.adam"
    beta1: float = setting(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = setting(0.95, "decay of the second moment", ge=0, lt=1)
    eps: float = setting(1e-8, "constant added to the root of the second moment", gt=0)


class MomentsDtype(Enum):
    """Dtype of AdamW's moments."""

    bf16 = "bf16"


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """AdamW; its weight decay is decoupled from the gradient."""

    _target_: str = "foundry.optimizers.adamw"
    moments_dtype: MomentsDtype | None = setting(
        None,
        "bf16: store both moments in bf16, with half of the memory, and update them in fp32; null: the dtype of the "
        "parameters",
    )
    cautious_weight_decay: bool = setting(
        False,
        "decay a weight only if the update moves it towards zero, so that the decay never opposes the update",
        since="0.1.0",
    )

    def check(self) -> Iterator[Violation]:
        """Check that moments stored in bf16 decay fast enough for its precision."""
        yield from super().check()
        betas = [("optimizer.beta1", self.beta1), ("optimizer.beta2", self.beta2), *self.groups.betas()]
        for key, beta in betas if self.moments_dtype is MomentsDtype.bf16 else ():
            if 1 - beta < _BF16_STEP:
                message = (
                    f"is {beta:g}, but a moment stored in bf16 cannot decay by {1 - beta:.2g} of itself: choose at "
                    f"most {1 - _BF16_STEP:.4g}, or optimizer.moments_dtype=null"
                )
                yield Violation(key, message)

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the precision of the weights is sufficient for cautious weight decay."""
        yield from _check_cautious_decay(self.cautious_weight_decay, run)


def _check_cautious_decay(is_cautious: bool, run: "Config") -> Iterator[Violation]:
    if is_cautious and run.precision.mode is PrecisionMode.pure_bf16:
        message = "is true but bf16 weights lose its decay to rounding; choose precision=amp_bfloat16"
        yield Violation("optimizer.cautious_weight_decay", message)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    _target_: str = "foundry.optimizers.sgd"
    momentum: float = setting(0.9, "decay of the velocity", ge=0, lt=1)
    nesterov: bool = setting(False, "use Nesterov momentum")

    def check(self) -> Iterator[Violation]:
        """Check that no group sets a decay of moments."""
        yield from super().check()
        for key, beta in self.groups.betas():
            yield Violation(key, f"is {beta:g} but optimizer=sgd has no moments; remove it, or choose optimizer=adamw")


class NsDtype(Enum):
    """Dtype of Muon's Newton-Schulz iteration."""

    fp32 = "fp32"
    bf16 = "bf16"

    @classmethod
    def following(cls, precision: PrecisionMode) -> "NsDtype":
        """Return bf16 if the model computes in bf16, else fp32, also with fp16: GPUs for fp16 lack native bf16."""
        return cls.bf16 if precision in (PrecisionMode.amp_bfloat16, PrecisionMode.pure_bf16) else cls.fp32


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for the matrices inside blocks; AdamW for embeddings, the head and vectors."""

    _target_: str = "foundry.optimizers.muon"
    momentum: float = setting(0.95, "decay of Muon's velocity", ge=0, lt=1)
    momentum_warmup_start: float | None = setting(
        None,
        "decay of Muon's velocity at the start of a linear rise to momentum; null: momentum throughout",
        ge=0,
        lt=1,
        since="0.1.0",
    )
    momentum_warmup: str = setting(
        "300",
        "duration of the rise from momentum_warmup_start, which a shorter run does not complete; a fraction refers to "
        "the horizon of the scheduler",
        parse=Duration.parse_positive,
        since="0.1.0",
    )
    nesterov: bool = setting(True, "use Nesterov momentum")
    ns_steps: int = setting(5, "number of Newton-Schulz iterations of the orthogonalisation", ge=1, le=1000)
    ns_dtype: NsDtype | None = setting(
        None, "dtype of the Newton-Schulz iterations; null: bf16 under amp_bfloat16 and pure_bf16, else fp32"
    )
    row_variance: bool = setting(
        False,
        "divide each row of Muon's update by the root of an average of its mean square, then restore the norm of the "
        "update",
        since="0.1.0",
    )
    row_variance_decay: float = setting(0.95, "decay of the average mean square of a row", ge=0, lt=1, since="0.1.0")
    beta1: float = setting(0.9, "AdamW's decay of the first moment", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW's decay of the second moment", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW's constant added to the root of the second moment", gt=0)
    cautious_weight_decay: bool = setting(
        False,
        "decay a weight, of Muon or of AdamW, only if the update moves it towards zero, so that the decay never "
        "opposes the update",
        since="0.1.0",
    )

    def check(self) -> Iterator[Violation]:
        """Check that the momentum warm-up rises, and that settings of options have their option."""
        yield from super().check()
        if not self.row_variance:
            yield from check_unused(self, "optimizer", ["row_variance_decay"], "optimizer.row_variance=true")
        if self.momentum_warmup_start is None:
            yield from check_unused(self, "optimizer", ["momentum_warmup"], "optimizer.momentum_warmup_start")
        elif self.momentum_warmup_start > self.momentum:
            yield Violation(
                "optimizer.momentum_warmup_start",
                f"is {self.momentum_warmup_start:g} but must be at most optimizer.momentum={self.momentum:g}; lower it",
            )

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the precision of the weights is sufficient for cautious weight decay."""
        yield from _check_cautious_decay(self.cautious_weight_decay, run)

    def momentum_warmup_samples(self, budget: Budget, horizon: float) -> float | None:
        """Return the length of the momentum warm-up in samples; None without a warm-up.

        Args:
            budget: size of the run.
            horizon: length of the learning-rate schedule in samples; reference of a fraction.

        Raises:
            ValueError: the length is in tokens, but the data has no tokens.
        """
        if self.momentum_warmup_start is None:
            return None
        return Duration.parse(self.momentum_warmup).samples(budget, reference=horizon)
