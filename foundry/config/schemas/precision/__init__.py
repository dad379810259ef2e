"""`precision=`: the arithmetic, the same under one process, DDP and FSDP2."""

from dataclasses import dataclass
from enum import Enum

from foundry.config.setting import setting


class WeightsDtype(Enum):
    """In which type weights are written or held when a run is over."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class PrecisionMode(Enum):
    """What the weights, the compute and the gradient reduction are held in."""

    amp_bfloat16 = "amp_bfloat16"
    pure_bf16 = "pure_bf16"
    fp32 = "fp32"
    amp_float16 = "amp_float16"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which arithmetic a run uses."""

    mode: PrecisionMode = setting(
        PrecisionMode.amp_bfloat16,
        "amp_bfloat16: fp32 weights, bf16 compute; amp_float16: the same in fp16, with loss scaling; pure_bf16; fp32",
    )
    tf32: bool = setting(
        False,
        "compute fp32 matrix products and convolutions in TF32, with 10 bits of mantissa; on NVIDIA GPUs since Ampere",
    )
