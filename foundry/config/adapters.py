"""What else must be as it is where adapters are trained."""

from collections.abc import Iterator

from foundry.config.errors import Violation
from foundry.config.schemas.optimizer import Muon
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.schemas.root import Config


def check_adapters(config: Config) -> Iterator[Violation]:
    """Refuse an optimizer and an arithmetic that would do adapters harm."""
    if not isinstance(config.peft, LoRA):
        return
    if isinstance(config.optimizer, Muon):
        message = "is muon, which would make every direction of peft=lora's thin matrices equally large"
        yield Violation("optimizer", f"{message}; choose optimizer=adamw")
    if config.precision.mode is PrecisionMode.pure_bf16:
        message = "is pure_bf16, which rounds most updates of adapters away; choose precision=amp_bfloat16"
        yield Violation("precision", message)
