"""Sharded initialization: each rank gets its part of the same weights and never holds the whole model."""

from functools import partial
from pathlib import Path

import pytest
from support.composition import configure
from support.harness import run_ranks, spawn
from support.tiny import TINY_LM

pytestmark = pytest.mark.distributed
TINY = ["model.hidden_size=24", "model.intermediate_size=40", "model.num_layers=3", "model.num_heads=4"]
LM = [*TINY, "model.num_kv_heads=2", "data.vocab_size=307", "model.vocab_size=307", "data.seq_len=16"]
HF = [
    "model=hf_llama",
    "model.config={hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, num_attention_heads: 4}",
    "data.vocab_size=307",
    "data.seq_len=16",
]
FOLDER = ["model=hf", "debug=fast", "data.seq_len=32", "objective.sample_tokens=16"]
DIT = ["hparams=diffusion", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4"]
OWN_DATA = f"hydra.searchpath=[{Path(__file__).parents[1] / 'parity' / 'conf'}]"
WINDOWS = [OWN_DATA, "data=windows", "data.image_size=16"]
POLICY = [*DIT, *WINDOWS, "model=policy_dit", "objective=diffusion_policy"]
VLM = [*TINY, OWN_DATA, "data=pictures", "model=vlm", "objective=sft", "optimizer=adamw"]
VLA = [
    "hparams=diffusion",
    *WINDOWS,
    "model=vla",
    "objective=flow_policy",
    "+data.instruction_tokens=6",
    "+data.vocab_size=307",
    *(f"model.backbone.{size.removeprefix('model.')}" for size in TINY),
    "model.backbone.num_kv_heads=2",
]
MODELS = {
    "decoder": LM,
    "tied": [*LM, "model.tie_embeddings=true"],
    "bf16": [*LM, "precision=pure_bf16"],
    "amp": [*LM, "precision=amp_bfloat16"],
    "dit": DIT,
    "policy": POLICY,
    "vlm": VLM,
    "vla": VLA,
    "huggingface": [*HF, "model.init_std=0.02"],
    "own init": HF,
}
STRATEGIES = {
    2: [
        ["distributed=fsdp"],
        ["distributed=ddp"],
        ["distributed=ddp", "distributed.shard_optimizer=true"],
        ["distributed=fsdp", "distributed.cpu_offload=true"],
    ],
    4: [["distributed=fsdp"], ["distributed=hsdp"]],
}
# Tensor parallelism, with FSDP2 over one shard (two ranks) or two shards (four ranks).
DIVIDED = ["distributed=fsdp", "distributed.tensor_parallel=2", "data.vocab_size=308", "model.vocab_size=308"]


def whole(parallel):
    """Return all weights by name, gathered from all ranks."""
    from foundry.core.sharded import is_sharded

    state = parallel.inner.state_dict()
    return {name: (t.full_tensor() if is_sharded(t) else t).clone() for name, t in state.items()}


def started(world, config, initial):
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    policy = PrecisionPolicy(config.precision.mode)
    model = policy.prepare(initial.model)
    return parallelize(
        model,
        policy,
        arrange(world, config.distributed),
        grad_checkpointing=False,
        torchcompile=False,
        fill=initial.fill,
    )


def assert_equal(found, expected):
    import torch

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def check_drawn(world, configs):
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parts.model import build_model, start_model

    for config in configs:
        parallel = started(world, config, start_model(config))
        expected = PrecisionPolicy(config.precision.mode).prepare(build_model(config))
        assert_equal(whole(parallel), expected.state_dict())


def every_strategy(world_size):
    cases = [(*model, *strategy) for model in MODELS.values() for strategy in STRATEGIES[world_size]]
    return cases + [(*MODELS[name], *DIVIDED) for name in ("decoder", "tied", "bf16", "amp")]


# Some models with FSDP2, and the decoder with each strategy.
SOME = [
    *((*MODELS[name], *STRATEGIES[2][0]) for name in ("decoder", "bf16", "vla", "own init")),
    *((*MODELS["decoder"], *strategy) for strategy in (*STRATEGIES[2][1:], DIVIDED)),
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(2, SOME, id="some"),
        pytest.param(2, every_strategy(2), marks=pytest.mark.long, id="two"),
        pytest.param(4, every_strategy(4), marks=pytest.mark.long, id="four"),
    ],
)
def test_sharded_initial_weights_equal_those_of_one_process(world_size, cases):
    size = [f"distributed.nproc_per_node={world_size}", "hparams.per_gpu_batch_size=1"]
    configs = [configure(*case, *size) for case in cases]
    run_ranks(check_drawn, world_size, configs)


def check_read(world, config, of_folder, run_dir, exported):
    """Compare weights read from a run, from its export, and by a model whose `model.path` is the export."""
    from dataclasses import replace

    from safetensors.torch import load_file

    from foundry.engine.initial_model import read_initial, resolve_weights
    from foundry.parts.model import start_model

    def read(config, node):
        initial = read_initial(node, resolve_weights(node), partial(start_model, config), world, "model.init_from")
        assert next(initial.model.parameters()).is_meta
        return whole(started(world, config, initial))

    expected = load_file(exported / "model.safetensors")
    for weights in (run_dir, exported, exported / "model.safetensors"):
        assert_equal(read(config, replace(config.model, init_from=str(weights))), expected)
    found = read(of_folder, of_folder.model)
    assert_equal({name.removeprefix("causal_lm."): tensor for name, tensor in found.items()}, expected)


@pytest.mark.long
def test_sharded_loading_of_a_checkpoint_or_folder_is_exact(tmp_path):
    from foundry.commands.export import ExportOptions, export
    from foundry.commands.library import run

    run(configure(*TINY_LM, "hparams.max_steps=1"), tmp_path / "run")
    export(ExportOptions(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    for strategy in ("fsdp", "ddp"):
        words = [f"distributed={strategy}", "distributed.nproc_per_node=2"]
        folder = configure(*FOLDER, f"model.path={tmp_path / 'out'}", *words)
        run_ranks(check_read, 2, configure(*TINY_LM, *words), folder, tmp_path / "run", tmp_path / "out")


def check_resumed(world, config):
    """Check that a resumed run draws no weights: it allocates memory for the checkpoint to fill."""
    from unittest.mock import patch

    from foundry.models import keyed_draws
    from foundry.models.initialisation import InitialModel
    from foundry.parts.model import build_empty

    with patch.object(keyed_draws._RandomWords, "numbers", side_effect=AssertionError("drawn")):
        parallel = started(world, config, InitialModel(build_empty(config)))
    assert not any(parameter.is_meta for parameter in parallel.model.parameters())


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.long)])
def test_resume_draws_no_initial_weights(strategy):
    configs = [configure(*words, f"distributed={strategy}", "distributed.nproc_per_node=2") for words in (LM, DIT, HF)]
    for config in configs:
        run_ranks(check_resumed, 2, config)


def measure_start(world, config):
    """Return the bytes of this rank's part of the model, of its largest unit, and the peak during the start."""
    import ctypes
    from pathlib import Path

    from foundry.core.sharded import local_part
    from foundry.models.fsdp_block import find_blocks
    from foundry.parts.model import start_model

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    world.barrier()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak to the current memory.
    before = status("VmRSS")
    initial = start_model(config)
    units = [sum(p.numel() * 4 for p in block.parameters()) for block in find_blocks(initial.model)]
    parallel = started(world, config, initial)
    held = sum(local_part(parameter).nbytes for parameter in parallel.model.parameters())
    return held, max(units), status("VmHWM") - before


@pytest.mark.long
def test_sharded_start_never_holds_the_whole_model():
    """At most the rank's shards and one block, plus the import of FSDP2; the model has 621 MB."""
    sizes = ["model.hidden_size=1024", "model.intermediate_size=2816", "model.num_layers=12", "model.num_heads=8"]
    words = [*sizes, "model.num_kv_heads=8", "model.vocab_size=512", "data.vocab_size=512", "distributed=fsdp"]
    config = configure(*words, "distributed.nproc_per_node=2", "data.seq_len=16")
    for held, block, peak in spawn(measure_start, 2, config):
        assert held > 300e6
        assert peak < held + block + 120e6


@pytest.mark.long
def test_wrapping_70b_parameters_needs_under_1_gb():
    """The script runs as rank 0 of 256 with the `fake` backend of torch."""
    import json
    import subprocess
    import sys
    from pathlib import Path

    script = Path(__file__).parents[2] / "benchmarks" / "startup_scale.py"
    command = [sys.executable, str(script), "--one", "70B wrapped 256"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert found["peak_mib"] < 1000
