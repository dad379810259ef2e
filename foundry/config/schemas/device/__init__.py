"""`device=`: the GPU or CPU on which a run or another command computes."""

from dataclasses import dataclass
from enum import Enum

from foundry.config.setting import setting

KIND_DOC = "auto: GPUs if any, and an error if torch cannot use them; cuda: GPUs; cpu: the CPU, even if there are GPUs"


class DeviceKind(Enum):
    """Kind of device."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Settings of the device of a run."""

    kind: DeviceKind = setting(DeviceKind.auto, KIND_DOC)
