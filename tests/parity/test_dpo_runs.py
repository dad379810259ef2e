"""Direct preference optimization: runs match a plain loop, runs in other layouts and resumed runs."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from parity_parts import differences, run_all, weights
from support.composition import configure
from support.examples import some_of

from foundry.core.errors import ConfigError
from foundry.data.order import GlobalOrder
from foundry.engine.train import train
from foundry.parts.data import build_data
from foundry.parts.model import build_model

STEPS, BATCH, LR, BETA = 20, 8, 3e-3, 0.2
WORDS = [
    "data=preferences",
    "objective=dpo",
    f"objective.ref_policy_kl_penalty={BETA}",
    "optimizer=adamw",
    "optimizer.weight_decay=0",
    "scheduler=constant",
    "scheduler.warmup=0",
    "precision=fp32",
    "data.seq_len=64",
    "data.vocab_size=257",
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    f"hparams.lr={LR}",
    f"hparams.global_batch_size={BATCH}",
    "hparams.grad_clip_norm=1.0",
    f"hparams.max_steps={STEPS}",
    f"scheduler.horizon='{STEPS}'",
    "tracking=none",
    "tracking.progress=false",
    "tracking.log_every_n_steps=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of pairs; the longer answer is not always the chosen one."""
    root = tmp_path_factory.mktemp("dpo")
    rows = [
        {"prompt": "?" * (1 + n % 3), "chosen": "yes " * (1 + n % 4), "rejected": "no " * (1 + n % 5)}
        for n in range(40)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def make(folder, *overrides):
    return configure(*WORDS, f"data.path={folder / 'rows.jsonl'}", f"data.cache_dir={folder / 'cache'}", *overrides)


def logged(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").open())
    return [line for line in lines if "loss" in line]


def log_prob(model, sample, row):
    """Return the log-probability of one answer, from full logits of one row without padding."""
    targets = sample["targets"][row]
    length = int((targets != -100).nonzero().max()) + 1
    logits = model(sample["tokens"][row, :length][None], return_logits=True).logits[0].double()
    return -F.cross_entropy(logits, targets[:length], ignore_index=-100, reduction="sum")


def raw_loop(config, *, sft_weight):
    """Train on one row at a time, with a copy as reference; return loss, accuracy and margin by step, and the model."""
    data, model = build_data(config), build_model(config)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    order = GlobalOrder(num_samples=len(data.train), fingerprint=data.fingerprint, seed=config.hparams.seed)
    found = []
    for step in range(STEPS):
        samples = [data.train[int(i)] for i in order.indices(range(step * BATCH, (step + 1) * BATCH))]
        policy = torch.stack([torch.stack([log_prob(model, sample, row) for row in (0, 1)]) for sample in samples])
        with torch.no_grad():
            fixed = torch.stack([torch.stack([log_prob(reference, s, row) for row in (0, 1)]) for s in samples])
        margin = BETA * ((policy - fixed)[:, 0] - (policy - fixed)[:, 1])
        loss = F.softplus(-margin).mean() - sft_weight * policy[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), (margin > 0).double().mean().item(), margin.mean().item()))
    return found, model


@pytest.mark.parametrize("sft_weight", some_of([0.0, 0.1], 0.1))
def test_dpo_run_matches_a_plain_loop_for_twenty_steps(folder, tmp_path, sft_weight):
    config = make(folder, "hparams.per_gpu_batch_size=4", f"objective.sft_loss_weight={sft_weight}")
    expected, model = raw_loop(config, sft_weight=sft_weight)
    train(config, tmp_path)
    lines = logged(tmp_path)
    for name, values in zip(("loss", "accuracy", "margin"), zip(*expected, strict=True), strict=True):
        # At the first step a margin of 1e-9 may have either sign.
        first = 1 if name == "accuracy" else 0
        assert [line[name] for line in lines[first:]] == pytest.approx(values[first:], abs=1e-5), name
    if sft_weight == 0:
        assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert lines[-1]["loss"] < 0.5
    assert differences(model.state_dict(), weights(config, tmp_path))[0] < 1e-4


@pytest.mark.long
def test_dpo_reference_of_an_adapter_run_is_the_base_model(folder, tmp_path):
    lines = {}
    for reference in ("auto", "cached", "copy"):
        words = ["peft=lora", "peft.adapter_dropout=0.2", f"objective.reference={reference}", "hparams.max_steps=8"]
        (tmp_path / reference).mkdir()
        train(make(folder, "hparams.per_gpu_batch_size=8", *words), tmp_path / reference)
        lines[reference] = logged(tmp_path / reference)
        assert (tmp_path / reference / "columns.safetensors").exists() == (reference == "cached")
    for reference in ("cached", "copy"):
        for name in ("loss", "margin", "chosen_reward"):
            ours, theirs = ([line[name] for line in lines[key]] for key in ("auto", reference))
            assert ours == pytest.approx(theirs, abs=1e-6), (reference, name)
    assert lines["auto"][0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines["auto"][-1]["loss"] < lines["auto"][0]["loss"]
    assert all(line["rejected_reward"] != 0 for line in lines["auto"][1:])


def test_reference_adapters_off_without_adapters_is_refused(folder):
    with pytest.raises(
        ConfigError, match=r"objective\.reference: is adapters_off but peft=none .* choose cached or copy"
    ):
        make(folder, "objective.reference=adapters_off")


LAYOUTS = {
    "1 x 8": (1, 8, []),
    "1 x 1": (1, 1, []),
    "DDP 2 x 2": (2, 2, ["distributed=ddp"]),
    "FSDP2 2 x 4": (2, 4, ["distributed=fsdp"]),
    "FSDP2 2 x 4, copy": (2, 4, ["distributed=fsdp", "objective.reference=copy"]),
    "1 x 8, adapters": (1, 8, ["peft=lora"]),
    "FSDP2 2 x 4, adapters": (2, 4, ["distributed=fsdp", "peft=lora"]),
    "1 x 2, packed": (1, 2, ["data.packing=true"]),
    "DDP 2 x 1, packed": (2, 1, ["distributed=ddp", "data.packing=true"]),
    "FSDP2 2 x 1, packed, copy": (2, 1, ["distributed=fsdp", "data.packing=true", "objective.reference=copy"]),
    "FSDP2 2 x 2, packed, adapters": (2, 2, ["distributed=fsdp", "data.packing=true", "peft=lora"]),
}


@pytest.mark.long
@pytest.mark.distributed
def test_dpo_weights_agree_between_layouts_and_resumes_are_exact(folder):
    runs, jobs = {}, []

    def job(layout, name, steps):
        processes, microbatch, own = LAYOUTS[layout]
        changes = [f"hparams.per_gpu_batch_size={microbatch}", f"distributed.nproc_per_node={processes}"]
        runs[name] = run = make(folder, *own, *changes, f"hparams.max_steps={steps}"), folder / name
        run[1].mkdir(exist_ok=True)
        return processes, run

    jobs = [job(layout, layout, STEPS) for layout in LAYOUTS]
    whole = ("1 x 8", "1 x 2, packed")
    run_all([*jobs, *(job(layout, f"{layout}, resumed", 9) for layout in whole)])
    run_all([job(layout, f"{layout}, resumed", STEPS) for layout in whole])
    one = weights(*runs["1 x 8"])
    for layout in list(LAYOUTS)[1:]:
        has_adapters = layout.endswith("adapters")
        if not has_adapters:
            assert differences(one, weights(*runs[layout]))[0] < 1e-5, layout
        undivided = "1 x 8, adapters" if has_adapters else "1 x 8"
        for name in ("loss", "accuracy", "margin", "chosen_reward"):
            ours, theirs = ([line[name] for line in logged(runs[key][1])][1:] for key in (layout, undivided))
            # A margin is a sum over tokens, with values up to 5.
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), (layout, name)
    for layout in whole:
        undisturbed, resumed = weights(*runs[layout]), weights(*runs[f"{layout}, resumed"])
        assert all(torch.equal(undisturbed[name], resumed[name]) for name in one), layout
