"""The size of a checkpoint that is planned is that of the tensors saved."""

import pytest
import torch

from foundry.checkpoint.tensors import collect
from foundry.config.build import build
from foundry.core.ema import WeightAverage
from foundry.planning.fake import build_fake
from foundry.planning.memory import checkpoint_bytes

SMALL = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=2"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_planned_is_saved(configure, optimizer, decay):
    ema_decay = "null" if decay is None else decay
    config = configure(*SMALL, f"optimizer={optimizer}", f"hparams.ema_decay={ema_decay}")
    model = build(config.model)
    ema = None if decay is None else WeightAverage(model, decay)
    optimizers = build(config.optimizer, model=model, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for one in optimizers:
        one.step()
    saved = collect(model, ema, optimizers)
    # Beside them Adam counts its steps, in four bytes a parameter.
    size = sum(tensor.nbytes for name, tensor in saved.items() if not name.endswith(".step"))
    assert size == checkpoint_bytes(config, build_fake(lambda: build(config.model)))
