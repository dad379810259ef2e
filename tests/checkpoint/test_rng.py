import json
import random
import sys

import numpy
import pytest
import torch

from foundry.checkpoint.rng import rng_state, set_rng_state


def draws(device):
    drawn = [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.randn(3).tolist()]
    return [*drawn, torch.rand(3, device=device).tolist()]


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_restored_rng_state_continues_the_sequences(name):
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    numpy.random.randn()  # numpy and random cache half of a pair.
    random.gauss(0, 1)
    state = json.loads(json.dumps(rng_state(device), allow_nan=False))
    expected = draws(device)
    draws(device)
    set_rng_state(state, device)
    assert draws(device) == expected


def test_rng_state_omits_numpy_if_it_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    assert set(rng_state(torch.device("cpu"))) == {"torch", "python"}
