"""On-policy distillation runs: layouts, a kill between two updates of a rollout, plan, evaluation, sampling."""

import json
import signal

import pytest
import torch
from support.outcome import metrics, weights
from support.warm import WarmShell

MORTAL = '''
import os
import signal

from foundry.tasks.post_training.objectives.distillation import Distillation


class Mortal(Distillation):
    """Is killed at its DIE_AT-th microbatch."""

    calls = 0

    def loss(self, model, microbatch):
        Mortal.calls += 1
        if Mortal.calls == int(os.environ.get("DIE_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, microbatch)
'''
MODEL = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=2", "model.num_heads=2"]
COMMON = [
    "debug=fast",
    "hparams=llm",
    "data=arithmetic",
    "data.num_rows=32",
    *MODEL,
    "model.num_kv_heads=2",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=4",
    "evaluation.max_samples=8",
    "evaluation.write_samples=false",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "precision=fp32",
    "optimizer=adamw",
]
STUDENT = [
    *COMMON,
    "data.form=prompts",
    "objective=distillation",
    "objective.mode=on_policy",
    "objective.teacher=teacher",
    "objective.divergence=mixed",
    "objective.top_k=64",
    "objective.max_new_tokens=8",
    "objective.num_prompts_per_step=8",
    "objective.num_generations_per_prompt=2",
    "objective.updates_per_rollout=2",
    "objective.generation_batch_size=4",
    "evaluation=answers",
    "hparams.max_steps=4",
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory, cache):
    """A shell in a folder with the run `teacher`, twice as wide as the student."""
    shell = WarmShell(tmp_path_factory.mktemp("on_policy"), cache, {"PYTHONPATH": "."})
    (shell.cwd / "own.py").write_text(MORTAL)
    shell.run(*COMMON, "objective=sft", "model.hidden_size=64", "hydra.run.dir=teacher")
    return shell


@pytest.mark.long
@pytest.mark.distributed
def test_on_policy_distillation_on_ddp_and_fsdp_matches_one_process(shell):
    two = ["distributed.nproc_per_node=2", "hparams.max_steps=2"]
    shell.run(*STUDENT, "hparams.max_steps=2", "hydra.run.dir=one")
    one = metrics(shell.cwd / "one")
    assert one[0]["divergence"] == one[0]["loss"] > 0.01
    assert one[0]["entropy"] > 1
    assert "reward" not in one[0]
    assert "val_exact_match" in one[-1]
    for name in ("ddp", "fsdp"):
        shell.run(*STUDENT, *two, f"distributed={name}", f"hydra.run.dir={name}")
        for ours, theirs in zip(metrics(shell.cwd / name), one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_run_killed_between_updates_of_a_rollout_resumes_bit_for_bit(shell):
    overrides = [*STUDENT, "objective._target_=own.Mortal", "evaluation.interval=null", "environment=arithmetic"]
    overrides += ["checkpoint.interval='1 steps'", "checkpoint.asynchronous=false", "hparams.max_steps=6"]
    shell.run(*overrides, "hydra.run.dir=whole")
    shell.run(*overrides, "hydra.run.dir=killed", variables={"DIE_AT": "8"}, code=-signal.SIGKILL)
    kept = weights(shell.cwd / "killed")
    assert {"source.tokens", "source.targets"} <= kept.keys(), "the fourth step is a second update"
    assert not any(name.startswith("teacher") for name in kept)
    shell.run(*overrides, "hydra.run.dir=killed")
    assert metrics(shell.cwd / "killed") == metrics(shell.cwd / "whole")
    assert "reward" in metrics(shell.cwd / "whole")[0]
    whole, resumed = weights(shell.cwd / "whole"), weights(shell.cwd / "killed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.long
def test_on_policy_distillation_is_planned_evaluated_and_sampled(shell):
    shell.run(*STUDENT, "hydra.run.dir=plan", module="foundry.plan")
    plan = json.loads((shell.cwd / "plan" / "plan.json").read_text())
    answers = {"prompts": 8, "generations": 2, "answers": 16, "updates": 2, "max_new_tokens": 8}
    assert plan["rollout"] == answers
    memory = plan["memory"]
    assert memory["frozen"] > memory["weights"], "the teacher is wider"
    assert memory["generation"] > 0
    assert memory["activations_estimated"] > 0
    shell.run(*STUDENT, "hydra.run.dir=student")
    shell.run("run=student", "max_samples=4", "max_new_tokens=4", "environment=arithmetic", module="foundry.eval")
    found = json.loads((shell.cwd / "student" / "eval.json").read_text())
    assert {"exact_match", "ended", "reward"} <= found.keys()
    stdout, _ = shell.run("run=student", "prompt='What is 47+38?'", "max_new_tokens=4", module="foundry.sample")
    assert "47+38" in stdout


@pytest.mark.long
def test_teacher_with_another_tokenizer_is_refused_before_training(shell):
    (shell.cwd / "other.txt").write_text("\n".join(f"{n} plus {n} is {n + n}!" for n in range(2000)))
    text = ["debug=fast", "data=text", "data.path=other.txt", "data.seq_len=160", "data.vocab_size=300", *MODEL]
    rest = ["model.num_kv_heads=2", "tracking=none", "evaluation.write_samples=false", "hydra.run.dir=stranger"]
    shell.run(*text, *rest, "optimizer=adamw", "hparams.max_steps=2")
    student = [*STUDENT, "data.vocab_size=300", "objective.teacher=stranger", "hydra.run.dir=refused"]
    _, stderr = shell.run(*student, code=2)
    assert stderr.startswith("objective.teacher: is ")
    assert "trained with another tokenizer than the run's" in stderr
