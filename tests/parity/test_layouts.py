"""The same global batches give the same weights, however they are cut into ranks and microbatches."""

import json

import pytest
import torch
from parity_parts import run_each
from safetensors.torch import load_file

from foundry.export import ExportOptions, export
from foundry.launch.local import run_local

# name: (processes, microbatch, overrides); the global batch is 16 in all of them.
LAYOUTS = {
    "1 x 4": (1, 4, []),
    "1 x 1": (1, 16, []),
    "DDP 2 x 2": (2, 4, ["distributed=ddp"]),
    "FSDP2 2 x 2": (2, 4, ["distributed=fsdp"]),
    "FSDP2 4 x 1": (4, 4, ["distributed=fsdp"]),
    "HSDP 2x2 x 2": (4, 2, ["distributed=hsdp"]),
}
TASKS = ("lm", "diffusion")


@pytest.fixture(scope="module")
def trained(configure, tmp_path_factory):
    """Run directories by (task, layout), after 20 steps in fp32."""
    root = tmp_path_factory.mktemp("layouts")
    jobs = {1: [], 2: [], 4: []}
    for task in TASKS:
        for name, (processes, microbatch, words) in LAYOUTS.items():
            config = configure(
                task,
                *words,
                "hparams.max_steps=20",
                f"hparams.per_gpu_batch_size={microbatch}",
                f"distributed.nproc_per_node={processes}",
            )
            run_dir = root / f"{task} {name}"
            run_dir.mkdir()
            jobs[processes].append((config, run_dir))
    run_each(jobs[1])
    for processes in (2, 4):
        run_local(processes, run_each, jobs[processes])
    return {(task, name): root / f"{task} {name}" for task in TASKS for name in LAYOUTS}


def weights(run_dir, ema=False):
    out = run_dir / ("export_ema" if ema else "export")
    if not out.exists():
        export(ExportOptions(run=str(run_dir), out=str(out), ema=ema))
    return load_file(out / "model.safetensors")


def difference(one, other):
    """Largest relative difference of any tensor, |a - b| / |a| in the L2 norm."""
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).norm() / one[k].norm().clamp(min=1e-8)) for k in one)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_final_weights_agree(trained, task, layout, record_property):
    first, other = weights(trained[task, "1 x 4"]), weights(trained[task, layout])
    found = difference(first, other)
    record_property("largest relative difference", found)
    print(f"{task:10} {layout:14} {found:.1e}")  # noqa: T201
    assert found < 1e-5


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_averaged_weights_and_held_out_loss_agree(trained, layout):
    first, other = trained["diffusion", "1 x 4"], trained["diffusion", layout]
    assert difference(weights(first, ema=True), weights(other, ema=True)) < 1e-5
    results = [json.loads((run_dir / "result.json").read_text()) for run_dir in (first, other)]
    assert results[0]["val_loss"] == pytest.approx(results[1]["val_loss"], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.slow
def test_training_moved_the_weights(trained, configure):
    from foundry.parts import build_model

    initial = build_model(configure("lm")).state_dict()
    moved = weights(trained["lm", "1 x 4"])
    assert difference({k: v for k, v in initial.items() if k in moved}, moved) > 1e-2
    assert all(torch.isfinite(tensor).all() for tensor in moved.values())
