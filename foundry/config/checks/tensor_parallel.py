"""What else must be as it is where ranks divide the matrices of a model between them."""

from collections.abc import Iterator

from foundry.config.schemas.hparams import CheckpointingPolicy
from foundry.config.schemas.model import Model, Transformer
from foundry.config.schemas.objective import SFT
from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation

_KEY = "distributed.tensor_parallel"
_DIVIDED = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")


def check_tensor_parallel(config: Config) -> Iterator[Violation]:
    """Refuse a model that does not divide, and parts that do not know of it.

    A model of the user's own says itself how it is divided, and is asked when it is built.
    """
    size = config.distributed.tensor_parallel
    if size == 1:
        return
    if isinstance(config.model, Model) and not config.model.is_divided:
        name = type(config.model).__name__
        yield Violation(_KEY, f"is {size} but model {name} is not divided; set it to 1, or choose model=transformer")
    elif isinstance(config.model, Transformer):
        for name in _DIVIDED:
            if (value := getattr(config.model, name)) % size:
                near = -(-value // size) * size
                message = f"is {value} but must be a multiple of {_KEY}={size}; the next is {near}"
                yield Violation(f"model.{name}", message)
    hparams = config.hparams
    recomputes_all = hparams.grad_checkpointing and hparams.grad_checkpointing_policy is CheckpointingPolicy.full
    if hparams.torchcompile and recomputes_all:
        message = f"is full, which torch.compile cannot do with {_KEY}={size}; set it to selective"
        yield Violation("hparams.grad_checkpointing_policy", f"{message}, or hparams.torchcompile=false")
    if isinstance(config.peft, LoRA):
        yield Violation(_KEY, f"is {size} but adapters of peft=lora are not divided; set it to 1")
    if isinstance(config.objective, SFT) and config.objective.attention_dropout:
        message = (
            f"is {config.objective.attention_dropout:g} but is drawn for whole layers, which {_KEY}={size} divides"
        )
        yield Violation("objective.attention_dropout", f"{message}; set it to 0")
