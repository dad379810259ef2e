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
def test_the_numbers_continue_as_they_would_have(name):
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    numpy.random.randn()  # half of a pair is kept
    random.gauss(0, 1)
    state = json.loads(json.dumps(rng_state(device), allow_nan=False))
    expected = draws(device)
    draws(device)
    set_rng_state(state, device)
    assert draws(device) == expected


def test_numpy_is_left_out_where_nothing_imported_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    assert set(rng_state(torch.device("cpu"))) == {"torch", "python"}
