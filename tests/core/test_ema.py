import pytest
import torch
from torch import nn

from foundry.core.ema import WeightAverage


def moved(model, step):
    """Set weights that differ in every element at every step."""
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).view_as(p) * 0.1 + step**2 * (index + 1))


@pytest.mark.parametrize("decay", [0.999, 0.3])
def test_ema_matches_its_formula_with_warmup_of_the_decay(decay):
    model = nn.Linear(3, 2)
    moved(model, 0)
    average = WeightAverage(model, decay)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for step in range(1, 8):
        moved(model, step)
        average.update()
        d = min(decay, (1 + step) / (10 + step))
        expected = {n: d * expected[n] + (1 - d) * p.detach().double() for n, p in model.named_parameters()}
    for name, value in expected.items():
        torch.testing.assert_close(average.average[name].double(), value, rtol=1e-6, atol=1e-6)


def test_ema_uses_the_full_decay_after_warmup():
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.9)
    for step in range(200):  # (1 + t) / (10 + t) exceeds 0.9 for t > 80
        moved(model, step)
        average.update()
    before = average.average["weight"].clone()
    with torch.no_grad():
        model.weight.zero_()
    average.update()
    torch.testing.assert_close(average.average["weight"], 0.9 * before)


@pytest.mark.parametrize("fails", [False, True])
def test_swapped_in_restores_weights_and_average_bitwise(fails):
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.9)
    moved(model, 5)
    average.update()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    averaged = {name: tensor.clone() for name, tensor in average.average.items()}
    addresses = [p.data_ptr() for p in model.parameters()]

    def inside():
        with average.swapped_in():
            assert all(torch.equal(p, averaged[name]) for name, p in model.named_parameters())
            if fails:
                raise ValueError("in the body")

    if fails:
        with pytest.raises(ValueError, match="in the body"):
            inside()
    else:
        inside()
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    assert all(torch.equal(average.average[name], averaged[name]) for name in averaged)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_ema_is_a_copy_of_the_weights():
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.5)
    before = average.average["weight"].clone()
    moved(model, 3)
    assert torch.equal(average.average["weight"], before)
    assert not average.average["weight"].requires_grad
