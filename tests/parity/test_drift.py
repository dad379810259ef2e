"""Layouts drift apart in fp32 only as rounding errors grow; in float64 they stay together."""

import json

import pytest
import torch
from support.warm import warm_ranks

from foundry.engine import trained_models
from foundry.engine.train import train
from foundry.launch.local import run_local
from foundry.models import token_log_probs, transformer
from foundry.models.initialisation import InitialModel
from foundry.parallel import grad_norm, precision

pytestmark = [pytest.mark.distributed, pytest.mark.long]

STEPS = 40
LAYOUTS = {"one": (1, []), "FSDP2": (2, ["distributed=fsdp"])}


class Double:
    """A stand-in for torch whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def train_in_double(config, run_dir):
    """Train with float64 weights, products, sums and log-probabilities; this process stays modified."""
    build = trained_models._build_initial
    trained_models._build_initial = lambda *args: InitialModel(build(*args).materialize().double())
    torch.Tensor.float = torch.Tensor.double
    for module in (grad_norm, precision, token_log_probs, transformer):
        module.torch = Double()
    precision._COMPUTE_DTYPES[config.precision.mode] = torch.float64
    return train(config, run_dir).metric


@pytest.fixture(scope="module")
def losses(configure, tmp_path_factory):
    """Return the losses of each step, by dtype and layout."""
    root, found = tmp_path_factory.mktemp("drift"), {}
    for kind, run in (("fp32", train), ("float64", train_in_double)):
        for layout, (processes, words) in LAYOUTS.items():
            run_dir = root / f"{kind} {layout}"
            size = [f"hparams.per_gpu_batch_size={16 // processes}", f"distributed.nproc_per_node={processes}"]
            few = [f"hparams.max_steps={STEPS}", "evaluation.interval=null", "checkpoint=none", "hparams.lr=0.03"]
            with warm_ranks():
                run_local(processes, run, configure("lm", *words, *size, *few), run_dir)
            lines = map(json.loads, (run_dir / "metrics.jsonl").open())
            found[kind, layout] = torch.tensor([line["loss"] for line in lines if "loss" in line], dtype=torch.float64)
    return found


def apart(losses, kind):
    one, other = (losses[kind, layout] for layout in LAYOUTS)
    assert len(one) == len(other) == STEPS
    return ((one - other).abs() / one).max().item()


def test_difference_between_layouts_is_rounding_error(losses):
    assert 0 < apart(losses, "fp32") < 1e-2
    assert apart(losses, "float64") < 1e-6 * apart(losses, "fp32")
