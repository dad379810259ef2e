"""Runs of objective=grpo: layouts, a kill between two updates of a rollout, and adapters."""

import signal

import pytest
import torch
from support.outcome import metrics, weights
from support.warm import WarmShell

OWN = '''
import os
import signal

from foundry.tasks.post_training.objectives.grpo import GRPO


class Mortal(GRPO):
    """Is killed at its DIE_AT-th microbatch."""

    calls = 0
    shares_prompts = True

    def loss(self, model, microbatch):
        Mortal.calls += 1
        if Mortal.calls == int(os.environ.get("DIE_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, microbatch)


class Digits:
    """The share of digits in an answer; of its prompt it knows the row."""

    def score(self, answers):
        (answer,) = answers
        assert "answer" in answer.columns
        return [{"digits": sum(c.isdigit() for c in answer.text) / 8}]
'''
TINY = [
    "debug=fast",
    "data=arithmetic",
    "data.form=prompts",
    "data.num_rows=32",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "objective=grpo",
    "objective.max_new_tokens=8",
    "objective.num_prompts_per_step=4",
    "objective.num_generations_per_prompt=4",
    "objective.updates_per_rollout=2",
    "objective.generation_batch_size=4",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=4",
    "hparams.max_steps=4",
    "environment=arithmetic",
    "evaluation=reward",
    "evaluation.max_samples=8",
    "evaluation.write_samples=false",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "precision=fp32",
]
OWN_DIGITS = ["environment._target_=own.Digits", "environment.weights={}"]


@pytest.fixture
def shell(tmp_path, cache):
    (tmp_path / "own.py").write_text(OWN)
    return WarmShell(tmp_path, cache, {"PYTHONPATH": "."})


PACKED = ["data.packing=true"]


@pytest.mark.long
@pytest.mark.parametrize(("packing", "die_at"), [([], 8), (PACKED, 4)], ids=["plain", "packed"])
def test_run_killed_between_updates_of_a_rollout_resumes_bit_for_bit(shell, packing, die_at):
    overrides = [*TINY, *packing, *OWN_DIGITS, "objective._target_=own.Mortal", "evaluation.interval=null"]
    overrides += ["checkpoint.interval='1 steps'", "checkpoint.asynchronous=false", "hparams.max_steps=6"]
    shell.run(*overrides, "hydra.run.dir=whole")
    shell.run(*overrides, "hydra.run.dir=killed", variables={"DIE_AT": str(die_at)}, code=-signal.SIGKILL)
    kept = weights(shell.cwd / "killed")
    assert {"source.tokens", "source.advantage", "source.old"} <= kept.keys(), "the fourth step is a second update"
    shell.run(*overrides, "hydra.run.dir=killed")
    assert metrics(shell.cwd / "killed") == metrics(shell.cwd / "whole")
    whole, resumed = weights(shell.cwd / "whole"), weights(shell.cwd / "killed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.long
@pytest.mark.distributed
def test_grpo_with_tensor_parallelism_matches_one_process(shell):
    """The ranks of a tensor-parallel group generate each completion together, and it is scored once."""
    own = [*TINY, *OWN_DIGITS, "model.vocab_size=258", "objective.ref_policy_kl_penalty=0.1", "hparams.max_steps=2"]
    divided = ["distributed=fsdp", "distributed.nproc_per_node=4", "distributed.tensor_parallel=2"]
    shell.run(*own, "hydra.run.dir=one")
    shell.run(*own, *divided, "hydra.run.dir=divided")
    one = metrics(shell.cwd / "one")
    assert one[0]["grad_norm"] > 0
    assert any("val_reward" in line for line in one)
    for ours, theirs in zip(metrics(shell.cwd / "divided"), one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.long
@pytest.mark.distributed
def test_grpo_on_ddp_fsdp_and_packed_matches_one_process(shell):
    """The run of one process repeats each prompt; the other runs share it between the completions of a microbatch."""
    two = ["distributed.nproc_per_node=2", "hparams.max_steps=2"]
    shell.run(*TINY, *OWN_DIGITS, "hparams.max_steps=2", "objective.share_prompts=false", "hydra.run.dir=one")
    one = metrics(shell.cwd / "one")
    assert one[0]["reward"] > 0
    assert one[0]["grad_norm"] > 0
    assert one[0]["mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert one[0]["kl"] == 0.0
    accumulated = ["hparams.max_steps=2", "hparams.per_gpu_batch_size=2", "hparams.grad_checkpointing=true"]
    layouts = {"accumulated": accumulated, "ddp": ["distributed=ddp", *two], "fsdp": ["distributed=fsdp", *two]}
    layouts |= {"packed": ["hparams.max_steps=2", *PACKED], "fsdp_packed": ["distributed=fsdp", *two, *PACKED]}
    for name, overrides in layouts.items():
        shell.run(*TINY, *OWN_DIGITS, *overrides, f"hydra.run.dir={name}")
        for ours, theirs in zip(metrics(shell.cwd / name), one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_grpo_with_lora_uses_the_base_model_as_reference(shell):
    overrides = [*TINY, *OWN_DIGITS, "peft=lora", "optimizer=adamw", "hparams.lr=0.05", "scheduler.warmup='0'"]
    shell.run(*overrides, "hydra.run.dir=adapted")
    lines = [line for line in metrics(shell.cwd / "adapted") if "kl" in line]
    assert [line["kl"] > 0 for line in lines] == [False, True, True, True], "the base is where the adapters began"
