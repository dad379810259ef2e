"""User-defined models with complete, missing or incomplete initial_weights()."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.keyed_draws import Normal
from foundry.parts.model import build_empty, build_model, start_model


class Own(nn.Module):
    """A model with a matrix, a vector and a buffer, initialized by its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.register_buffer("frequencies", torch.arange(4.0))


class Drawn(Own):
    """A model that declares the distribution of its matrix."""

    def initial_weights(self):
        """Implement the hook of `ModelHooks`."""
        return {"matrix": Normal(0.5)}


class Partly(Drawn):
    """A model with a matrix that its initial_weights() does not declare."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)


def config(kind, seed=42):
    model = {"_target_": f"{__name__}.{kind.__name__}"}
    return SimpleNamespace(model=model, objective={}, data={}, hparams=SimpleNamespace(seed=seed))


def test_declared_initial_weights_depend_on_name_and_seed():
    initial = start_model(config(Drawn))
    assert initial.model.matrix.is_meta
    first, again, other = initial.materialize(), build_model(config(Drawn)), build_model(config(Drawn, seed=1))
    assert torch.equal(first.matrix, again.matrix)
    assert not torch.equal(first.matrix, other.matrix)
    for model in (first, again, other):
        assert torch.equal(model.vector, torch.arange(3.0))
        assert torch.equal(model.frequencies, torch.arange(4.0))


def test_model_without_initial_weights_keeps_its_constructor_values():
    initial = start_model(config(Own))
    assert initial.fill is None
    torch.manual_seed(42)
    assert torch.equal(initial.model.matrix, torch.randn(4, 3))
    assert not build_empty(config(Own)).matrix.is_meta


def test_undeclared_matrix_of_initial_weights_is_refused():
    with pytest.raises(ConfigError, match=r"model\._target_: is Partly, whose initial_weights\(\) lacks head\.weight"):
        start_model(config(Partly))
    assert build_empty(config(Partly)).head.weight.is_meta  # A checkpoint will fill all weights.
