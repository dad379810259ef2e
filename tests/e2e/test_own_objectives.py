"""Custom objectives with a frozen model or with their own source of windows: layouts, plan, resume."""

import json
import signal

import pytest
import torch
from support.in_process import Commands
from support.outcome import metrics, weights
from support.tiny import TINY_LM
from support.warm import WarmShell

OWN = '''
import os
import signal
from dataclasses import replace

import torch

from foundry.objectives.next_token import NextToken
from foundry.core.protocols import LossSum, Mean


class Stay(NextToken):
    """Cross-entropy, and the squared distance of each token's log-probability from the model at the start."""

    metrics = ("distance", "reference")

    def __init__(self, *, world, tokenizer, teacher=None, **settings):
        super().__init__(**settings)
        assert world.dp_size >= 1 and tokenizer is not None
        self.frozen_models = {"reference": teacher}

    def compare(self, frozen):
        self.reference = frozen["reference"]
        assert not self.reference.training
        assert not any(parameter.requires_grad for parameter in self.reference.parameters())

    def loss(self, model, microbatch):
        part = super().loss(model, microbatch)
        own = model(microbatch["tokens"], microbatch["targets"]).log_prob
        theirs = self.reference(microbatch["tokens"], microbatch["targets"]).log_prob
        assert not theirs.requires_grad
        distance = (own - theirs).square().sum()
        metrics = {"distance": Mean(distance.detach()), "reference": Mean(-theirs.sum())}
        return LossSum(part.loss + 0.1 * distance, metrics)


class Twice(NextToken):
    """Every window is used twice; the second time with the targets that the first has stored as tensors."""

    def build_source(self, context):
        return Repeated(context.build_loader(False), context.build_loader(True), context)


class Repeated:
    def __init__(self, loader, everything, context):
        self.loader, self.kept, self.uses, self.world = loader, {}, 0, context.world
        whole = everything.next_window()
        assert sum(len(part["position"]) for part in whole.microbatches) == whole.num_samples

    def next_window(self):
        window = self.loader.next_window()
        self.uses += 1
        if self.uses == int(os.environ.get("DIE_AT", 0)) and self.world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.kept:
            total = torch.tensor([float(sum(part["tokens"].sum() for part in window.microbatches))])
            self.kept = {"total": self.world.dp_sum(total.to(self.world.device)).cpu()}
            return replace(window, metrics={"total": self.kept["total"].item()}, num_tokens=10)
        total, self.kept = self.kept["total"], {}
        return replace(window, metrics={"total": -total.item()}, num_tokens=7)

    def state_dict(self):
        return {"loader": self.loader.state_dict(), "uses": self.uses}

    def load_state_dict(self, state):
        self.loader.load_state_dict(state["loader"])
        self.uses = state["uses"]

    def tensors(self):
        return dict(self.kept)

    def load_tensors(self, tensors):
        self.kept = dict(tensors)

    def rewind(self, samples):
        self.loader.rewind(samples)


class Unsaved(NextToken):
    """Its source cannot be saved."""

    def build_source(self, context):
        return Windows(context.build_loader(False))


class Windows:
    def __init__(self, loader):
        self.next_window, self.state_dict = loader.next_window, loader.state_dict
'''
SMALL = [*TINY_LM, "evaluation.write_samples=false", "tracking=none", "tracking.log_every_n_steps=1", "precision=fp32"]
LAYOUTS = {
    "one": [],
    "ddp": ["distributed=ddp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=4"],
    "fsdp": ["distributed=fsdp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=4"],
}


@pytest.fixture
def shell(tmp_path, cache):
    (tmp_path / "own.py").write_text(OWN)
    return WarmShell(tmp_path, cache, {"PYTHONPATH": "."})


@pytest.mark.long
@pytest.mark.distributed
def test_frozen_reference_is_the_initial_model_on_all_layouts_and_on_resume(shell):
    stay = [*SMALL, "objective._target_=own.Stay", "hparams.max_steps=4", "evaluation.interval='1 steps'"]
    for name, overrides in LAYOUTS.items():
        shell.run(*stay, *overrides, f"hydra.run.dir={name}")
    one = metrics(shell.cwd / "one")
    assert one[0]["distance"] == 0.0, "at the start the model is its reference"
    assert one[-1]["val_distance"] > 0
    for name in ("ddp", "fsdp"):
        for ours, theirs in zip(metrics(shell.cwd / name), one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert len({round(line["val_reference"], 6) for line in one if "val_reference" in line}) == 1, "it never learns"
    shell.run(*stay, "hydra.run.dir=cut", "hparams.max_steps=2", "scheduler.horizon=4")
    shell.run(*stay, "hydra.run.dir=whole", "scheduler.horizon=4")
    shell.run(*stay, "hydra.run.dir=cut", "scheduler.horizon=4")
    assert metrics(shell.cwd / "cut")[-2:] == metrics(shell.cwd / "whole")[-2:]


def test_source_without_a_method_is_refused_before_the_first_step(tmp_path, cache):
    (tmp_path / "own.py").write_text(OWN)
    run_command = Commands(tmp_path, cache, {"PYTHONPATH": "."})
    _, stderr = run_command(*SMALL, "objective._target_=own.Unsaved", "hydra.run.dir=run", code=2)
    problem = "returns an object of type Windows, which has no method load_state_dict(state)"
    assert f"objective._target_: has a build_source() that {problem}\n" in stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_plan_counts_the_memory_of_a_frozen_teacher(shell):
    (shell.cwd / "conf" / "objective").mkdir(parents=True)
    (shell.cwd / "conf" / "objective" / "taught.yaml").write_text(
        "_target_: own.Stay\nteacher: ${model}\n_recursive_: false\n"
    )
    overrides = ["--config-dir=conf", *[w for w in SMALL if not w.startswith("objective.")], "objective=taught"]
    shell.run(*overrides, "hydra.run.dir=plan", module="foundry.plan")
    memory = json.loads((shell.cwd / "plan" / "plan.json").read_text())["memory"]
    assert memory["frozen"] == memory["weights"] + memory["buffers"] > 0
    assert memory["activations_estimated"] > 0
    shell.run(*overrides, "hydra.run.dir=run")
    assert metrics(shell.cwd / "run")[0]["distance"] == 0.0


@pytest.mark.long
def test_killed_run_with_its_own_source_resumes_bit_for_bit(shell):
    overrides = [*SMALL, "objective._target_=own.Twice", "hparams.max_steps=6", "checkpoint.interval='1 steps'"]
    overrides += ["checkpoint.asynchronous=false", "evaluation.interval=null"]
    shell.run(*overrides, "hydra.run.dir=whole")
    lines = metrics(shell.cwd / "whole")
    totals = [line["total"] for line in lines if "total" in line]
    assert [total > 0 for total in totals] == [True, False] * 3
    assert totals[::2] == [-total for total in totals[1::2]]
    assert [line["tokens"] for line in lines if "tokens" in line] == [10, 17, 27, 34, 44, 51]
    shell.run(*overrides, "hydra.run.dir=killed", variables={"DIE_AT": "4"}, code=-signal.SIGKILL)
    kept = weights(shell.cwd / "killed")
    assert kept["source.total"].tolist() == [totals[2]]
    shell.run(*overrides, "hydra.run.dir=killed")
    assert metrics(shell.cwd / "killed") == lines
    whole, resumed = weights(shell.cwd / "whole"), weights(shell.cwd / "killed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
