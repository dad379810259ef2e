"""A model that knows its shapes and types, and has no numbers.

`FakeTensorMode` runs a model's own constructor without allocating anything, so it works for any model, however large.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.root import Config
from foundry.models.lora import add_adapters
from foundry.parts.model import build_model


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
    # torch draws truncated normals again until all values are within, which fakes cannot tell.
    with mode, _left_out(nn.init, "_no_grad_trunc_normal_"):
        return FakeModel(make(), mode)


def build_adapted(config: Config) -> nn.Module:
    """The model of a run with its adapters, where it has some, and without the weights of its base.

    Raises:
        ConfigError: a layer is chosen that the model has not, or that cannot have an adapter.
    """
    model = build_model(config)
    if isinstance(config.peft, LoRA):
        with _left_out(nn.Module, "to"):  # torch cannot move fakes, and these are where they belong
            add_adapters(model, config.peft, config.hparams.seed)
    return model


@contextmanager
def _left_out(owner: Any, name: str) -> Iterator[None]:
    """Have a function that returns its first argument leave that as it is."""
    original = getattr(owner, name)

    def leave(value: Any, *arguments: Any, **options: Any) -> Any:
        return value

    setattr(owner, name, leave)
    try:
        yield
    finally:
        setattr(owner, name, original)
