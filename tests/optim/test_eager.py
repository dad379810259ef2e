"""The optimizers that avoid the import of the compiler match torch's, bit for bit."""

import copy

import pytest
import torch
from torch import nn, optim

from foundry.optim import eager

KINDS = {"AdamW": {"lr": 1e-2, "fused": True}, "Adam": {"lr": 1e-2}, "SGD": {"lr": 1e-2, "momentum": 0.9}}


@pytest.mark.parametrize("name", KINDS)
def test_eager_optimizers_match_torch_in_steps_state_and_hooks(name):
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    models = {"own": own, "torch": copy.deepcopy(own)}
    kinds = {"own": getattr(eager, name), "torch": getattr(optim, name)}
    optimizers = {key: kinds[key](models[key].parameters(), **KINDS[name]) for key in kinds}
    calls = []
    optimizers["own"].register_step_post_hook(lambda optimizer, args, kwargs: calls.append(type(optimizer).__name__))
    for step in range(4):
        if step == 2:  # Resume from the saved state.
            state = copy.deepcopy(optimizers["own"].state_dict())
            optimizers["own"] = kinds["own"](models["own"].parameters(), **KINDS[name])
            optimizers["own"].load_state_dict(state)
        batch = torch.randn(4, 5)
        for key, model in models.items():
            optimizers[key].zero_grad()
            model(batch).square().sum().backward()
            optimizers[key].step()
    for one, other in zip(models["own"].parameters(), models["torch"].parameters(), strict=True):
        assert torch.equal(one, other)
    saved = [optimizer.state_dict() for optimizer in optimizers.values()]
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    for index, state in saved[0]["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved[1]["state"][index][key]))
    assert calls == [name, name]
    assert isinstance(optimizers["own"], optim.Optimizer)
