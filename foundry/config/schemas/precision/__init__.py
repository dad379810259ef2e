"""`precision=`: the dtypes of weights and computation, the same under one process, DDP and FSDP2."""

from dataclasses import dataclass
from enum import Enum

from foundry.config.setting import setting


class WeightsDtype(Enum):
    """Dtype for exporting weights, or for loading them after training."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class PrecisionMode(Enum):
    """Dtypes of weights, computation and gradient reduction."""

    amp_bfloat16 = "amp_bfloat16"
    pure_bf16 = "pure_bf16"
    fp32 = "fp32"
    amp_float16 = "amp_float16"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Settings of the numerical precision of a run."""

    mode: PrecisionMode = setting(
        PrecisionMode.amp_bfloat16,
        "amp_bfloat16: fp32 weights, bf16 compute; amp_float16: the same in fp16, with loss scaling; pure_bf16; fp32",
    )
    tf32: bool = setting(
        False,
        "compute fp32 matrix products and convolutions in TF32, with 10 bits of mantissa, on NVIDIA GPUs since Ampere",
    )
