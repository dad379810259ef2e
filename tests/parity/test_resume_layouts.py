"""A run that goes on in another layout, or in other microbatches, ends as one that stayed in one process.

Twenty steps in one layout and twenty in another against forty of one process, in fp32. The suite takes every layout
once on each side; all pairs, as a table:

    FOUNDRY_ALL_LAYOUTS=1 pytest -s tests/parity/test_resume_layouts.py
"""

import os

import pytest
import torch
from parity_parts import run_each

from foundry.checkpoint.folder import find
from foundry.checkpoint.tensors import load_weights
from foundry.launch.local import run_local
from foundry.parts import build_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

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


@pytest.fixture(scope="module")
def trained(configure, tmp_path_factory):
    """Run directories: one process undisturbed, by layout after twenty steps, by pair after forty."""
    root = tmp_path_factory.mktemp("resumed")

    def job(layout, name, steps, *words):
        processes, microbatch, own = {**LAYOUTS, OTHER_MICROBATCH: (1, 2, [])}[layout]
        config = configure(
            "lm",
            *own,
            "scheduler.horizon='40'",
            f"hparams.max_steps={steps}",
            f"hparams.per_gpu_batch_size={microbatch}",
            f"distributed.nproc_per_node={processes}",
            *words,
        )
        (root / name).mkdir()
        return processes, (config, root / name)

    run_all([job("1", "whole", 40), *(job(name, name, 20) for name in {saved for saved, _ in PAIRS})])
    resumed = [
        job(loaded, f"{saved} to {loaded}", 40, f"checkpoint.resume='{root / saved}'") for saved, loaded in PAIRS
    ]
    run_all(resumed)
    return lambda name: weights(configure("lm"), root / name)


def run_all(jobs):
    """Train, all that need as many processes in one launch."""
    for processes in (1, 2, 4):
        own = [job for number, job in jobs if number == processes]
        if processes == 1:
            run_each(own)
        elif own:
            run_local(processes, run_each, own)


def weights(config, run_dir):
    model = build_model(config)
    load_weights(find(run_dir), model)
    return model.state_dict()


def difference(one, other):
    """Largest relative difference of any tensor, |a - b| / |a| in the L2 norm."""
    return max(float((one[k] - other[k]).norm() / one[k].norm().clamp(min=1e-8)) for k in one)


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_it_ends_as_if_it_had_stayed(trained, saved, loaded, record_property):
    found = difference(trained("whole"), trained(f"{saved} to {loaded}"))
    record_property("largest relative difference", found)
    print(f"\n| {saved:8} | {loaded:15} | {found:.1e} |", end="")  # noqa: T201
    assert found < 1e-5


def test_the_second_half_moved_the_weights(trained):
    whole, half = trained("whole"), trained(PAIRS[0][0])
    assert difference(half, whole) > 1e-2
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
