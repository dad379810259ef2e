"""A run resumed in another layout or microbatch size ends with the weights of an uninterrupted run on one process.

Twenty steps in each of two layouts are compared with forty on one process, in fp32, with AdamW and with Muon. With its
`long` tests, the suite saves and loads in every layout; all pairs, as a table:

    FOUNDRY_ALL_LAYOUTS=1 pytest -n 0 -s -m "long or not long" tests/parity/test_resume_layouts.py
"""

import os
from functools import cache

import pytest
import torch
from parity_parts import differences, run_all, weights

pytestmark = pytest.mark.distributed

# name: (processes, microbatch, overrides); the global batch is 16 in every layout.
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
DEFAULT = ("muon", *PAIRS[0])
CASES = [
    pytest.param(*case, marks=() if case == DEFAULT else pytest.mark.long)
    for case in ((optimizer, *pair) for optimizer in ("adamw", "muon") for pair in PAIRS)
]


@pytest.fixture(scope="module")
def trained(configure, tmp_path_factory):
    """Return `trained(optimizer)`: weights after 40 steps on one process, or after 20 in each of one or two layouts."""
    root = tmp_path_factory.mktemp("resumed")

    @cache
    def train(optimizer, layout, steps, *overrides):
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
        run = config, root / str(len(list(root.iterdir())))
        run[1].mkdir()
        run_all([(processes, run)])
        return run

    def trained(optimizer, saved=None, loaded=None):
        if saved is None:
            return weights(*train(optimizer, "1", 40))
        half = train(optimizer, saved, 20)
        return weights(*(half if loaded is None else train(optimizer, loaded, 40, f"checkpoint.resume='{half[1]}'")))

    return trained


@pytest.mark.parametrize(("optimizer", "saved", "loaded"), CASES)
def test_run_resumed_in_another_layout_matches_an_uninterrupted_run(trained, optimizer, saved, loaded, record_property):
    found, largest = differences(trained(optimizer), trained(optimizer, saved, loaded))
    record_property("largest relative difference", found)
    print(f"\n| {optimizer:5} | {saved:8} | {loaded:15} | {found:.1e} | {largest:.1e} |", end="")  # noqa: T201
    assert found < 1e-5


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.long), "muon"])
def test_second_half_of_the_run_changes_the_weights(trained, optimizer):
    whole, half = trained(optimizer), trained(optimizer, PAIRS[0][0])
    assert differences(half, whole)[0] > 1e-2
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
