"""Settings of the built-in evaluators, which are selected by `_target_` in `evaluation.evaluators`."""

from dataclasses import dataclass
from typing import Any

from foundry.config.setting import setting


def _samples() -> Any:
    return setting(None, "number of samples or prompts, from the first on; null: all", ge=1, le=10**15)


def _batch_size() -> Any:
    return setting("${hparams.per_gpu_batch_size}", "samples or prompts per forward pass", ge=1, le=10**9, alone=32)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Settings of the evaluator that computes the loss and the objective's metrics on the validation split."""

    _target_: str = "foundry.evals.HeldOut"
    per_gpu_batch_size: int = _batch_size()
    max_samples: int | None = _samples()
    torchmetrics: dict[str, Any] | None = setting(
        None, "metrics of torchmetrics by name, each a `_target_` with its arguments"
    )


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """Settings of the evaluator that scores greedy completions of validation prompts."""

    _target_: str = "foundry.evals.ExactMatch"
    max_new_tokens: int = setting(256, "maximum length of a completion in tokens", ge=1, le=10**7)
    per_gpu_batch_size: int = _batch_size()
    max_samples: int | None = _samples()
    torchmetrics: dict[str, Any] | None = setting(
        None, "metrics of torchmetrics by name, each a `_target_` with its arguments"
    )


@dataclass(frozen=True, kw_only=True)
class DrawnSamples:
    """Settings of the evaluator that generates images or text with the objective."""

    _target_: str = "foundry.evals.DrawnSamples"
