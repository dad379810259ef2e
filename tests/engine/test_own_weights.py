"""Models of one's own that say how their weights are drawn, that do not, and that say it of some only."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.keyed_draws import Normal
from foundry.parts.model import build_empty, build_model, start_model


class Own(nn.Module):
    """Its constructor leaves a matrix, a vector and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.register_buffer("frequencies", torch.arange(4.0))


class Drawn(Own):
    """It says how its matrix is drawn."""

    def initial_weights(self):
        """As `ModelHooks` has it."""
        return {"matrix": Normal(0.5)}


class Partly(Drawn):
    """It has a matrix more than it says."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)


def config(kind, seed=42):
    model = {"_target_": f"{__name__}.{kind.__name__}"}
    return SimpleNamespace(model=model, objective={}, data={}, hparams=SimpleNamespace(seed=seed))


def test_a_model_that_says_how_is_drawn_by_name_and_seed():
    initial = start_model(config(Drawn))
    assert initial.model.matrix.is_meta
    first, again, other = initial.whole(), build_model(config(Drawn)), build_model(config(Drawn, seed=1))
    assert torch.equal(first.matrix, again.matrix)
    assert not torch.equal(first.matrix, other.matrix)
    for model in (first, again, other):
        assert torch.equal(model.vector, torch.arange(3.0))
        assert torch.equal(model.frequencies, torch.arange(4.0))


def test_a_model_that_does_not_has_what_its_constructor_gives():
    initial = start_model(config(Own))
    assert initial.fill is None
    torch.manual_seed(42)
    assert torch.equal(initial.model.matrix, torch.randn(4, 3))
    assert not build_empty(config(Own)).matrix.is_meta


def test_a_matrix_that_is_not_named_is_refused():
    with pytest.raises(ConfigError, match=r"model\._target_: is Partly, whose initial_weights\(\) lacks head\.weight"):
        start_model(config(Partly))
    assert build_empty(config(Partly)).head.weight.is_meta  # for a checkpoint, which has them all
