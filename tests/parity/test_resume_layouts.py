"""A run that is resumed in another layout, or in other microbatches, ends as one that stayed in one process.

Twenty steps in one layout and twenty in another against forty of one process, in fp32, with AdamW and with Muon. The
suite takes every layout once on each side; all pairs, as a table:

    FOUNDRY_ALL_LAYOUTS=1 pytest -n 0 -s -m "long or not long" tests/parity/test_resume_layouts.py
"""

import os
from functools import cache

import pytest
import torch
from parity_parts import differences, run_all, weights

pytestmark = pytest.mark.distributed

# name: (processes, microbatch, overrides); the global batch is 16 in all of them.
LAYOUTS = {
    "1": (1, 8, []),
    "DDP 2": (2, 4, ["distributed=ddp"]),
    "FSDP2 2": (2, 8, ["distributed=fsdp"]),
    "FSDP2 4": (4, 4, ["distributed=fsdp"]),
    "HSDP 2x2": (4, 2, ["distributed=hsdp"]),
}
OTHER_MICROBATCH = "1, microbatch 2"
NAMES = list(LAYOUTS)
SHIFTED = [(saved, NAMES[(index + 2) % len(NAMES)]) for index, saved in enumerate(NAMES)]
ALL = [(saved, loaded) for saved in NAMES for loaded in NAMES]
PAIRS = [*(ALL if os.environ.get("FOUNDRY_ALL_LAYOUTS") else SHIFTED), ("FSDP2 4", OTHER_MICROBATCH)]


OPTIMIZERS = (pytest.param("adamw", marks=pytest.mark.long), "muon")


@pytest.fixture(scope="module")
def trained(configure, tmp_path_factory):
    """Weights by optimizer and name: one process undisturbed, a layout after twenty steps, a pair after forty."""
    root, runs = tmp_path_factory.mktemp("resumed"), {}

    def job(optimizer, layout, name, steps, *overrides):
        processes, microbatch, own = {**LAYOUTS, OTHER_MICROBATCH: (1, 2, [])}[layout]
        config = configure(
            "lm",
            *own,
            f"optimizer={optimizer}",
            "scheduler.horizon='40'",
            f"hparams.max_steps={steps}",
            f"hparams.per_gpu_batch_size={microbatch}",
            f"distributed.nproc_per_node={processes}",
            *overrides,
        )
        runs[optimizer, name] = run = config, root / f"{optimizer} {name}"
        run[1].mkdir()
        return processes, run

    def resumed(optimizer, saved, loaded):
        run_dir = runs[optimizer, saved][1]
        return job(optimizer, loaded, f"{saved} to {loaded}", 40, f"checkpoint.resume='{run_dir}'")

    @cache
    def train(optimizer):
        run_all([job(optimizer, "1", "whole", 40), *(job(optimizer, name, name, 20) for name in NAMES)])
        run_all([resumed(optimizer, *pair) for pair in PAIRS])

    def trained(optimizer, name):
        train(optimizer)
        return weights(*runs[optimizer, name])

    return trained


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_it_ends_as_if_it_had_stayed(trained, optimizer, saved, loaded, record_property):
    found, largest = differences(trained(optimizer, "whole"), trained(optimizer, f"{saved} to {loaded}"))
    record_property("largest relative difference", found)
    print(f"\n| {optimizer:5} | {saved:8} | {loaded:15} | {found:.1e} | {largest:.1e} |", end="")  # noqa: T201
    assert found < 1e-5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_second_half_moved_the_weights(trained, optimizer):
    whole, half = trained(optimizer, "whole"), trained(optimizer, PAIRS[0][0])
    assert differences(half, whole)[0] > 1e-2
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
