"""Models of fake tensors, which have shapes and types but no data.

`FakeTensorMode` runs a model's own constructor without allocating memory, so it works for any model of any size.
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
    """A model of fake tensors.

    Attributes:
        model: its parameters and buffers have shapes and types on the CPU, and no storage.
        mode: fake tensor mode of the model; it also converts other tensors to fake ones.
    """

    model: nn.Module
    mode: FakeTensorMode


def build_fake(make: Callable[[], nn.Module]) -> FakeModel:
    """Build a model without allocating its weights; exceptions of `make` are raised unchanged.

    Args:
        make: builds the model, as for training.
    """
    # With fallback kernels, torch would run an operation without a fake kernel on real zeros, and allocate them.
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    # torch resamples truncated normals until all values are in range, which cannot be checked on fake tensors.
    with mode, _replaced_by_identity(nn.init, "_no_grad_trunc_normal_"):
        return FakeModel(make(), mode)


def build_adapted(config: Config) -> nn.Module:
    """Build the model of a run with its adapters, if any. Within `build_fake`, no weights of a base are loaded.

    Raises:
        ConfigError: the settings select a layer that the model does not have, or that does not support adapters.
    """
    model = build_model(config)
    if isinstance(config.peft, LoRA):
        with _replaced_by_identity(
            nn.Module, "to"
        ):  # torch cannot move fake tensors, and these are already on the right device
            add_adapters(model, config.peft, config.hparams.seed)
    return model


@contextmanager
def _replaced_by_identity(owner: Any, name: str) -> Iterator[None]:
    """During the body, replace a function that modifies and returns its first argument by one that only returns it."""
    original = getattr(owner, name)

    def return_unchanged(value: Any, *arguments: Any, **options: Any) -> Any:
        return value

    setattr(owner, name, return_unchanged)
    try:
        yield
    finally:
        setattr(owner, name, original)
