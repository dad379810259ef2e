"""Distillation runs whose teacher is another run: layouts, resume, tokenizer check and plan."""

import json

import pytest
from support.in_process import Commands
from support.small_text import RUN, SMALL, write_text
from support.warm import WarmShell

STUDENT = [
    *RUN,
    *SMALL,
    "objective=distillation",
    "objective.teacher=teacher",
    "optimizer=adamw",
    "hparams.lr=1e-2",
    "hparams.max_steps=20",
    "scheduler.horizon=20",
]
LAYOUTS = {
    "one": ["hparams.per_gpu_batch_size=4"],
    "ddp": ["distributed=ddp", "distributed.nproc_per_node=2"],
    "fsdp": ["distributed=fsdp", "distributed.nproc_per_node=2", "objective.top_k=300"],
    "tensor_parallel": ["distributed=fsdp", "distributed.nproc_per_node=4", "distributed.tensor_parallel=2"],
}


@pytest.fixture(scope="module")
def taught(tmp_path_factory, cache):
    """A shell in a folder with the run `teacher`, twice as wide as the student, and the overrides of the data."""
    shell = WarmShell(tmp_path_factory.mktemp("distillation"), cache)
    text = write_text(shell.cwd)
    wide = [*RUN, *SMALL, "model.hidden_size=32", "hparams.max_steps=60", "hparams.lr=1e-2"]
    Commands(shell.cwd, cache)(text, *wide, "hydra.run.dir=teacher")
    return shell, [text, "data.tokenizer=teacher/tokenizer.json"]


def metrics(shell, name):
    lines = map(json.loads, (shell.cwd / name / "metrics.jsonl").open())
    kept = ("loss", "val_loss", "cross_entropy", "divergence", "val_divergence")
    return [{key: line[key] for key in kept if key in line} for line in lines]


@pytest.mark.long
@pytest.mark.distributed
def test_distillation_reduces_divergence_equally_on_all_layouts(taught):
    shell, data = taught
    for name, overrides in LAYOUTS.items():
        shell.run(*data, *STUDENT, *overrides, f"hydra.run.dir={name}")
    one = metrics(shell, "one")
    assert one[-1]["val_divergence"] < 0.8 * one[0]["divergence"]
    for name in list(LAYOUTS)[1:]:
        for ours, theirs in zip(metrics(shell, name), one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.long
def test_student_started_from_its_teacher_diverges_and_resumes_equally(taught):
    shell, data = taught
    same = [override for override in STUDENT if override not in SMALL]
    same += ["model=base", "model.path=teacher", "hparams.lr=1e-3", "objective.temperature=2", "hparams.max_steps=4"]
    same += ["checkpoint.interval=null"]
    shell.run(*data, *same, "scheduler.horizon=4", "hydra.run.dir=whole")
    whole = [line for line in metrics(shell, "whole") if "loss" in line]
    assert abs(whole[0]["divergence"]) < 1e-6
    assert whole[-1]["divergence"] > 1e-6
    shell.run(*data, *same, "scheduler.horizon=4", "hydra.run.dir=half", "hparams.max_steps=2")
    shell.run(*data, *same, "scheduler.horizon=4", "hydra.run.dir=half")
    assert [line for line in metrics(shell, "half") if "loss" in line] == whole


def test_teacher_with_another_tokenizer_is_refused_before_training(taught, cache):
    shell, _ = taught
    other = "\n".join(f"{n} plus {n} is {n + n}!" for n in range(2000))
    (shell.cwd / "other.txt").write_text(other)
    _, stderr = Commands(shell.cwd, cache)("data.path=other.txt", *STUDENT, "hydra.run.dir=refused", code=2)
    assert stderr.splitlines()[-1].startswith("objective.teacher: is ")
    assert "trained with another tokenizer than the run's" in stderr


@pytest.mark.long
def test_plan_counts_the_memory_of_the_teacher(taught, cache):
    shell, data = taught
    Commands(shell.cwd, cache)(*data, *STUDENT, "hydra.run.dir=plan", module="foundry.plan")
    memory = json.loads((shell.cwd / "plan" / "plan.json").read_text())["memory"]
    assert memory["frozen"] > memory["weights"]
    assert memory["activations_estimated"] > 0
