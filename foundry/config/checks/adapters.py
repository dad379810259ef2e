"""What else must be as it is where adapters are trained."""

from collections.abc import Iterator

from foundry.config.build import weights_of_parts
from foundry.config.schemas.optimizer import Muon
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation


def check_adapters(config: Config) -> Iterator[Violation]:
    """Refuse an optimizer and an arithmetic that would do adapters harm."""
    if not isinstance(config.peft, LoRA):
        return
    for name, path in weights_of_parts(config.model).items():
        message = f"is {path}, and peft=lora keeps adapters alone, whose base is one run or file; train a run without"
        yield Violation(f"model.{name}.init_from", f"{message} peft first, and start from that with model=base")
    if isinstance(config.optimizer, Muon):
        message = "is muon, which would make every direction of peft=lora's thin matrices equally large"
        yield Violation("optimizer", f"{message}; choose optimizer=adamw")
    if config.precision.mode is PrecisionMode.pure_bf16:
        message = "is pure_bf16, which rounds most updates of adapters away; choose precision=amp_bfloat16"
        yield Violation("precision", message)
