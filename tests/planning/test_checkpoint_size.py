"""The planned size of a checkpoint equals the size of the saved tensors."""

import pytest
import torch

from foundry.checkpoint.tensors import collect
from foundry.config.build import build
from foundry.core.ema import WeightAverage
from foundry.planning.fake import build_fake
from foundry.planning.memory import checkpoint_bytes

SMALL = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=2"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muon optimizer.row_variance=true", "sgd"])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_planned_checkpoint_size_equals_the_saved_tensors(configure, optimizer, decay):
    ema_decay = "null" if decay is None else decay
    config = configure(*SMALL, *f"optimizer={optimizer}".split(), f"hparams.ema_decay={ema_decay}")
    model = build(config.model)
    ema = None if decay is None else WeightAverage(model, decay)
    optimizers = build(config.optimizer, model=model, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for one in optimizers:
        one.step()
    saved = collect(model, ema, optimizers)
    # Adam also saves step counters, four bytes per parameter tensor, which the plan leaves out.
    size = sum(tensor.nbytes for name, tensor in saved.items() if not name.endswith(".step"))
    assert size == checkpoint_bytes(config, build_fake(lambda: build(config.model)))
