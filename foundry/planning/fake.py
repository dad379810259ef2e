"""A model that knows its shapes and types, and has no numbers.

`FakeTensorMode` runs a model's own constructor without allocating anything, so it works for any model, however large.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.root import Config
from foundry.models.lora import add_adapters
from foundry.parts import build_model


@dataclass(frozen=True)
class FakeModel:
    """A model made of fake tensors.

    Attributes:
        model: its parameters and buffers have shapes and types on the CPU, and no storage.
        mode: under which it was built, and which makes fakes of other tensors for it.
    """

    model: nn.Module
    mode: FakeTensorMode


def build_fake(make: Callable[[], nn.Module]) -> FakeModel:
    """Build a model without allocating its weights; what its constructor raises is passed on.

    Args:
        make: makes the model, as for training.
    """
    # Without a kernel for fake tensors torch would run the real one on zeros, and allocate them.
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with mode, _truncated_normals_left_out():
        return FakeModel(make(), mode)


def build_adapted(config: Config) -> nn.Module:
    """The model of a run with its adapters, where it has some, and without the weights of its base.

    Raises:
        ConfigError: a layer is chosen that the model has not, or that cannot have an adapter.
    """
    model = build_model(config)
    if isinstance(config.peft, LoRA):
        add_adapters(model, config.peft, config.hparams.seed)
    return model


@contextmanager
def _truncated_normals_left_out() -> Iterator[None]:
    """Draw no truncated normals: torch draws again until all values are within, which fakes cannot tell."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name)

    def leave(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return tensor

    setattr(nn.init, name, leave)
    try:
        yield
    finally:
        setattr(nn.init, name, original)
