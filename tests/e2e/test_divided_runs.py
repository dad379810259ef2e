"""Tensor-parallel runs: resumed with another tensor-parallel degree, sampled and exported."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.samples import read_samples
from support.small_text import RUN, SMALL, write_text
from support.warm import WarmShell

from foundry.checkpoint.shard import Chunk
from foundry.checkpoint.tensor_index import read_index
from foundry.commands.export import ExportOptions, export
from foundry.commands.sample import SampleOptions, sample
from foundry.run_dir.checkpoints import find

pytestmark = [pytest.mark.long, pytest.mark.distributed]
# With its default eps AdamW amplifies the rounding of sums to 2e-5, even without tensor parallelism.
TEXT = [
    *RUN,
    "optimizer.eps=1e-4",
    *SMALL,
    "checkpoint.interval=6",
    "optimizer=adamw",
    "scheduler.horizon=12",
    "hparams.ema_decay=0.9",
]
FOUR = ["distributed=fsdp", "distributed.nproc_per_node=4", "hparams.per_gpu_batch_size=1"]
DIVIDED = [*FOUR, "distributed.tensor_parallel=2"]


@pytest.fixture(scope="module")
def started(tmp_path_factory, cache):
    """A shell with one whole run and half a run of each layout, and the override with the path of their text."""
    shell = WarmShell(tmp_path_factory.mktemp("divided"), cache)
    text = write_text(shell.cwd)
    shell.run(text, *TEXT, "hparams.max_steps=12", "hydra.run.dir=one")
    for name, overrides in (("divided", DIVIDED), ("sharded", FOUR)):
        shell.run(text, *TEXT, *overrides, "hparams.max_steps=6", f"hydra.run.dir={name}")
    return shell, text


def weights(run_dir):
    """Return the tensors of the last checkpoint, assembled from their shards."""
    index = read_index(find(run_dir))
    tensors = {name: torch.empty(index.shape(name), dtype=index.dtype(name)) for name in index.entries}
    index.fill({name: Chunk(tensor, (0,) * tensor.ndim) for name, tensor in tensors.items()})
    return tensors


def losses(shell, name):
    lines = map(json.loads, (shell.cwd / name / "metrics.jsonl").open())
    return {(line["step"], key): line[key] for line in lines for key in ("loss", "val_loss") if key in line}


@pytest.mark.parametrize(("saved", "loaded"), [("divided", FOUR), ("divided", []), ("sharded", DIVIDED)])
def test_run_resumes_with_another_tensor_parallel_degree(started, saved, loaded):
    shell, text = started
    name = f"{saved} {len(loaded)}"
    shell.run(text, *TEXT, *loaded, "hparams.max_steps=12", f"checkpoint.resume={saved}", f"hydra.run.dir='{name}'")
    ends = {key: value for key, value in losses(shell, "one").items() if key[0] > 6}
    found = losses(shell, name)
    assert sum(key == "loss" for _, key in found) == 6
    assert {key: found[key] for key in ends} == pytest.approx(ends, rel=1e-5)
    whole, resumed = weights(shell.cwd / "one"), weights(shell.cwd / name)
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert (resumed[key] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-8), key


def test_tensor_parallel_run_is_sampled_and_exported(started):
    shell, _ = started
    options = {"prompt": "3 times", "max_new_tokens": 8, "temperature": 0.0}
    file = sample(SampleOptions(run=str(shell.cwd / "divided"), **options))
    assert read_samples(file)[0].startswith("3 times")
    export(ExportOptions(run=str(shell.cwd / "divided"), out=str(shell.cwd / "exported")))
    exported, saved = load_file(shell.cwd / "exported" / "model.safetensors"), weights(shell.cwd / "divided")
    assert exported
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved[f"ema.{name}"])
