"""`optimizer=`: PyTorch's own optimizers, with the decay exclusions every run wants."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from foundry.config.errors import Violation
from foundry.config.setting import check_fields, setting

ROLES = ("embeddings", "head")
"""Names of parameter groups that need no pattern: token embeddings, and the matrix that makes predictions of states."""


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters with a learning rate or weight decay of their own."""

    match: str | None = setting(
        None, "regular expression found in parameter names; null for the groups `embeddings` and `head`", parse=_pattern
    )
    lr_mult: float = setting(1.0, "factor on the learning rate, from warm-up to floor", ge=0)
    wd_mult: float | None = setting(
        None, "factor on the weight decay; null: 1 for matrices, 0 for biases, norms and other vectors", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What every optimizer has. The learning rate is `hparams.lr` shaped by `scheduler`."""

    _target_: str
    weight_decay: float = setting(
        0.01, "weight decay of matrices; biases, norms and other vectors are exempt", ge=0, source="wd"
    )
    groups: dict[str, ParamGroup] = setting(
        dict,
        "parameters with multipliers of their own, by name: embeddings, head, or any with a match",
        source="decoupled_lr, apply_wd_to_qk_layernorm",
    )

    def check(self) -> Iterator[Violation]:
        """Say which groups do not say whom they hold, or are out of bounds."""
        for name, group in self.groups.items():
            key = f"optimizer.groups.{name}"
            yield from check_fields(group, key)
            if (group.match is None) != (name in ROLES):
                remedy = "leave it out" if name in ROLES else f"give a regular expression, or use {' or '.join(ROLES)}"
                yield Violation(f"{key}.match", f"is {'null' if group.match is None else group.match}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam; its weight decay is an L2 term added to the gradient."""

    _target_: str = "foundry.optim.optimizers.adam"
    beta1: float = setting(0.9, "decay of the first moment", ge=0, lt=1, source="adam_beta1")
    beta2: float = setting(0.95, "decay of the second moment", ge=0, lt=1, source="adam_beta2")
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0, source="adam_eps")


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """AdamW; its weight decay is decoupled from the gradient."""

    _target_: str = "foundry.optim.optimizers.adamw"


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    _target_: str = "foundry.optim.optimizers.sgd"
    momentum: float = setting(0.9, "decay of the velocity", ge=0, lt=1, source="sgd_momentum")
    nesterov: bool = setting(False, "look ahead by one step of momentum")


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for the matrices inside blocks; AdamW for embeddings, the head and vectors."""

    _target_: str = "foundry.optim.optimizers.muon"
    momentum: float = setting(0.95, "decay of Muon's velocity", ge=0, lt=1)
    nesterov: bool = setting(True, "look ahead by one step of momentum")
    ns_steps: int = setting(5, "Newton-Schulz iterations of the orthogonalisation", ge=1)
    beta1: float = setting(0.9, "AdamW's decay of the first moment", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW's decay of the second moment", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW's addition to the root of the second moment", gt=0)
