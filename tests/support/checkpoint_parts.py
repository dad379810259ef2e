"""A small model and helpers that save it, for tests of checkpoints."""

import json

import torch
import xxhash
from torch import nn

from foundry.checkpoint.saver import Checkpointer
from foundry.checkpoint.tensors import collect, describe
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST

ALONE = World.single(torch.device("cpu"))
KNOWN = {"samples": 8, "tokens": None, "config_hash": "c0ffee", "config": {"a": {"b": 1}}, "strategy": "none"}


class Net(nn.Module):
    """A model with a buffer, a transposed (non-contiguous) weight and a scalar."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 3)
        self.first.weight.data = torch.randn(4, 3).T
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("table", torch.randn(5))


def saver(run_dir, world=ALONE, **options):
    """Create a run directory and return its Checkpointer for `write`; its own `save` would save an empty model."""
    run_dir.mkdir(parents=True, exist_ok=True)
    default = {"model": nn.Module(), "asynchronous": False, "keep_last": None, "keep_every_steps": None, "strict": True}
    return Checkpointer(run_dir, world, **default | options)


def write(run_dir, step, model, ema=None, optimizers=(), *, checkpointer=None, state=None, source=None, **options):
    """Save one checkpoint, wait for it, and return its folder."""
    checkpointer = checkpointer or saver(run_dir)
    checkpointer.write(
        step,
        tensors=lambda: collect(model, ema, optimizers, source),
        manifest={**KNOWN, "state": state or {"position": step}, "optimizer": describe(model, optimizers)},
        rank_state={"rng": step},
        **{"wait": True, **options},
    )
    return run_dir / "checkpoints" / f"step_{step:08d}"


def stepped(model, optimizer, steps=3):
    """Run steps of an optimizer with random gradients of the model, and return the optimizer."""
    torch.manual_seed(7)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def rewrite_manifest(folder, **changes):
    """Change a manifest together with its checksum; None deletes a field."""
    content = json.loads((folder / MANIFEST).read_text()) | changes
    content = {key: value for key, value in content.items() if value is not None and key != "checksum"}
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps({"checksum": checksum, **content}))
