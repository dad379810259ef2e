"""`hparams=`: batch sizes, learning rate, budget, loss and gradient handling."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from foundry.config.setting import OnResume, setting
from foundry.core.batch_sizes import BatchSizes, parse_count
from foundry.core.errors import Violation, as_text

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


class ScheduleUnit(Enum):
    """Unit of the thresholds of `batch_schedule`."""

    auto = "auto"
    tokens = "tokens"
    samples = "samples"


class CheckpointingPolicy(Enum):
    """Extent of the recomputation by `grad_checkpointing`."""

    full = "full"
    selective = "selective"


def parse_auto(text: str) -> None:
    """Check a setting that can be true, false or auto.

    Raises:
        ValueError: the text is another word.
    """
    if text.lower() not in ("true", "false", "auto"):
        raise ValueError(f"is {as_text(text)} but must be true, false or auto")


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Ramp of the global batch size, in equal increments up to `global_batch_size`."""

    start: int | None = setting(None, "global batch size of the first step; null: no ramp", ge=1, le=10**12)
    increment: int | None = setting(None, "samples added to the batch size at each stage of the ramp", ge=1, le=10**12)
    over_samples: str | None = setting(
        None, "length of the whole ramp in samples, such as 300000, 300k or 9.5M", parse=parse_count
    )
    every_samples: str | None = setting(
        None,
        "samples at each batch size before the last, an alternative to over_samples = every_samples x "
        "(global_batch_size - start) / increment",
        parse=parse_count,
        since="0.1.0",
    )

    def check(self) -> Iterator[Violation]:
        """Check that the settings of a ramp are complete, and that its length is given once."""
        names = ("start", "increment", "over_samples", "every_samples")
        settings = {name for name in names if getattr(self, name) is not None}
        missing = [name for name in ("start", "increment") if name not in settings]
        if not settings & {"over_samples", "every_samples"}:
            missing.append("over_samples (or every_samples)")
        if settings and missing:
            yield Violation("hparams.batch_ramp", f"has no {' and no '.join(missing)}; set all three, or none of them")
        elif settings >= {"over_samples", "every_samples"}:
            message = "is set together with over_samples, the length of the whole ramp; choose one of them"
            yield Violation("hparams.batch_ramp.every_samples", message)


@dataclass(frozen=True, kw_only=True)
class HParams:
    """Hyperparameters that do not depend on the kind of optimizer, schedule or model."""

    global_batch_size: int = setting(
        512,
        "samples per optimizer step, over all ranks and microbatches",
        ge=1,
        le=10**12,
    )
    per_gpu_batch_size: int = setting(
        8,
        "samples per forward pass on one rank: the microbatch size",
        ge=1,
        le=10**6,
        on_resume=OnResume.same,
    )
    batch_ramp: BatchRamp = field(default_factory=BatchRamp)
    batch_schedule: str | None = setting(
        None,
        'global batch sizes from the given thresholds on, such as "0:256 100M:512 1B:1024"; the last is '
        "global_batch_size",
        parse=BatchSizes.parse,
    )
    batch_schedule_unit: ScheduleUnit = setting(
        ScheduleUnit.auto,
        "unit of the thresholds in batch_schedule: tokens, samples, or auto: tokens if the data has them",
    )
    allow_rounding: bool = setting(
        False,
        "round batch sizes down to a multiple of per_gpu_batch_size x ranks instead of refusing them",
    )
    accum_freq: int = setting(
        "${accum_freq:${.global_batch_size},${.per_gpu_batch_size},${distributed.nproc_per_node}}",
        "microbatches per rank and optimizer step, after any ramp; computed from the batch sizes, never set",
        on_resume=OnResume.same,
    )
    seed: int = setting(42, "seed of initial weights, data order and noise", ge=0)
    lr: float = setting(
        1e-4,
        "peak learning rate",
        gt=0,
        on_resume=OnResume.schedule,
    )
    epochs: float | None = setting(
        None,
        "budget in passes over the training data; null: no limit",
        gt=0,
        le=10**9,
        on_resume=OnResume.budget,
    )
    max_steps: int | None = setting(
        None,
        "budget in optimizer steps; null: no limit",
        ge=1,
        le=10**12,
        on_resume=OnResume.budget,
    )
    train_samples: int | None = setting(
        None,
        "budget in samples; null: no limit; the shortest budget applies",
        ge=1,
        le=10**15,
        on_resume=OnResume.budget,
    )
    max_minutes: float | None = setting(
        None,
        "maximum training time in minutes, including the time before a resume; the run then ends at its current "
        "step; null: no limit",
        gt=0,
        le=10**9,
        on_resume=OnResume.budget,
    )
    loss_function: str = setting(
        "cross_entropy",
        "expected loss of the objective, only checked, since objective= determines it: cross_entropy (language "
        "models), mse (diffusion) or l1 (regression of actions)",
    )
    z_loss_coefficient: float = setting(
        0.0,
        "weight of the mean squared log-sum-exp of the logits, over valid tokens; 0 disables it",
        ge=0,
    )
    grad_clip_norm: float | None = setting(
        None,
        "maximum global L2 norm of the gradient; null: no clipping; inf: the norm is measured only",
        gt=0,
        finite=False,
    )
    grad_checkpointing: bool = setting(
        False,
        "recompute the activations of each block in the backward pass, to save memory",
        on_resume=OnResume.same,
    )
    grad_checkpointing_policy: CheckpointingPolicy = setting(
        CheckpointingPolicy.full,
        "full: recompute the whole block; selective: keep the outputs of matrix products and attention",
        on_resume=OnResume.same,
    )
    torchcompile: bool = setting(False, "compile each block with torch.compile", on_resume=OnResume.same)
    check_first_step: bool | str = setting(
        "auto",
        "run a forward and backward pass of the largest shape before the first step, without training, to detect a "
        "lack of memory at once; auto: on GPUs only",
        parse=parse_auto,
        on_resume=OnResume.same,
    )
    deterministic: bool = setting(
        False,
        "use only deterministic algorithms, which are slower on a GPU; nearly all algorithms on a CPU are "
        "deterministic",
        on_resume=OnResume.same,
    )
    ema_decay: float | None = setting(
        None, "decay of the exponential moving average of the weights; null: no average", gt=0, lt=1
    )

    def check(self) -> Iterator[Violation]:
        """Check the batch size ramp, and that no policy of recomputation is set without recomputation."""
        yield from self.batch_ramp.check()
        if self.grad_checkpointing_policy is CheckpointingPolicy.selective and not self.grad_checkpointing:
            message = "is selective but nothing is recomputed; set hparams.grad_checkpointing=true, or leave this out"
            yield Violation("hparams.grad_checkpointing_policy", message)

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that torch.compile is not combined with tensor parallelism and full recomputation of blocks."""
        size = run.distributed.tensor_parallel
        recomputes_all = self.grad_checkpointing and self.grad_checkpointing_policy is CheckpointingPolicy.full
        if size > 1 and self.torchcompile and recomputes_all:
            message = (
                f"is full, which torch.compile does not support with distributed.tensor_parallel={size}; set it to"
            )
            yield Violation("hparams.grad_checkpointing_policy", f"{message} selective, or hparams.torchcompile=false")
