"""Adapters: training in any layout gives the same weights, and peft loads adapters that several ranks saved."""

import pytest
import torch
from parity_parts import differences, run_all
from peft import PeftModel
from transformers import AutoModelForCausalLM

from foundry.checkpoint.tensors import load_weights
from foundry.commands.export import ExportOptions, export
from foundry.engine.restore import restore
from foundry.models.lora import add_adapters
from foundry.parts.model import build_model
from foundry.run_dir.checkpoints import find

pytestmark = [pytest.mark.distributed, pytest.mark.long]

FSDP = "distributed=fsdp"
AMP = "precision=amp_bfloat16"
# name: (processes, microbatch, overrides); the global batch is 16 in every layout.
LAYOUTS = {
    "1 x 8": (1, 8, []),
    "DDP 2": (2, 4, ["distributed=ddp"]),
    "DDP 2, in one piece": (2, 8, ["distributed=ddp", "distributed.overlap_grad_reduce=false"]),
    "DDP 2, sharded optimizer": (2, 4, ["distributed=ddp", "distributed.shard_optimizer=true"]),
    "FSDP2 2": (2, 4, [FSDP]),
    "FSDP2 2, recomputed": (2, 4, [FSDP, "hparams.grad_checkpointing=true"]),
    "FSDP2 2, offloaded": (2, 8, [FSDP, "distributed.cpu_offload=true"]),
    "HSDP 2x2": (4, 2, ["distributed=hsdp"]),
    "amp 1 x 8": (1, 8, [AMP]),
    "amp 1 x 4": (1, 4, [AMP]),
    "amp DDP 2": (2, 8, [AMP, "distributed=ddp"]),
    "amp DDP 2, sharded, in one piece": (
        2,
        8,
        [AMP, "distributed=ddp", "distributed.shard_optimizer=true", "distributed.overlap_grad_reduce=false"],
    ),
    "amp FSDP2 2": (2, 8, [AMP, FSDP]),
    "amp HSDP 2x2": (4, 4, [AMP, "distributed=hsdp"]),
}


@pytest.fixture(scope="module")
def trained(configure, tmp_path_factory):
    """Train twelve steps in each layout on one base; return configuration and run directory by layout."""
    root = tmp_path_factory.mktemp("adapters")

    def run(name, processes, *overrides):
        (root / name).mkdir()
        return processes, (configure("lm", *overrides, f"distributed.nproc_per_node={processes}"), root / name)

    base = run("base", 1, "hparams.max_steps=5", "hparams.per_gpu_batch_size=8")
    run_all([base])
    runs = {"base": base[1]}
    jobs = []
    for name, (processes, microbatch, own) in LAYOUTS.items():
        budget = ["hparams.max_steps=12", f"hparams.per_gpu_batch_size={microbatch}", "hparams.ema_decay=0.9"]
        start = ["peft=lora", f"model.init_from={root / 'base'}", "peft.adapter_dim=4"]
        jobs.append(run(name, processes, *budget, *start, *own))
        runs[name] = jobs[-1][1]
    run_all(jobs)
    return runs


def adapters(config, run_dir, ema=False):
    model = build_model(config)
    add_adapters(model, config.peft, seed=5)
    load_weights(find(run_dir), model, ema=ema, trained_only=True)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if " x " not in name])
@pytest.mark.parametrize("ema", [False, True])
def test_adapter_weights_agree_between_layouts(trained, layout, ema):
    # In bfloat16 the gradient of each microbatch is rounded, so compare equal microbatch sizes.
    microbatch = LAYOUTS[layout][1] if layout.startswith("amp") else 8
    alone = f"{'amp ' * layout.startswith('amp')}1 x {microbatch}"
    found, _ = differences(adapters(*trained[alone], ema), adapters(*trained[layout], ema))
    print(f"{layout}: {found:.1e}")  # noqa: T201
    assert found < 1e-5
    moved = [tensor.norm() for name, tensor in adapters(*trained[layout]).items() if "lora_B" in name]
    assert min(moved) > 1e-3


@pytest.mark.parametrize("layout", ["FSDP2 2", "DDP 2"])
def test_plain_peft_loads_adapters_saved_by_two_ranks(trained, layout, tmp_path):
    for name, run in (("base", "base"), ("adapter", layout)):
        export(ExportOptions(run=str(trained[run][1]), out=str(tmp_path / name), trust=True))
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = restore(trained[layout][1], "last", ema=True, trust=True).model(tokens, return_logits=True).logits
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        torch.testing.assert_close(model.eval()(tokens).logits, expected, atol=1e-6, rtol=1e-5)
