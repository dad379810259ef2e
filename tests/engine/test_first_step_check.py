"""The check before the first step fails if the largest microbatch does, and does not affect the run."""

import logging
import random
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from support import composition
from support.examples import some_of
from support.outcome import metrics, outcome
from support.tiny import SMALL_LM, TINY_DIT, TINY_LM
from support.warm import WarmShell

from foundry.engine.first_step import FirstStepCheck
from foundry.engine.train import train
from foundry.models.transformer import Transformer
from foundry.objectives.next_token import NextToken
from foundry.run_dir.checkpoints import list_checkpoints
from foundry.training.memory_error import OutOfMemoryError

ON, OFF = "hparams.check_first_step=true", "hparams.check_first_step=false"
QUIET = [
    "precision=fp32",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "evaluation.interval=null",
    "evaluation.max_samples=4",
    "evaluation.write_samples=false",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=2",
    "hparams.max_steps=2",
    "scheduler.warmup='0'",
]
LM = [*TINY_LM, *QUIET]
SFT = ["data=arithmetic", "data.form=chats", "data.chat_template=plain", "data.num_rows=32", "objective=sft"]
CHATS = [*(word for word in SMALL_LM if not word.startswith("data.")), *QUIET, *SFT, "data.seq_len=192"]
PROMPTS = [word for word in CHATS if not word.startswith(("data.form", "data.chat", "data.seq", "objective"))]
GRPO = [
    *PROMPTS,
    "data.form=prompts",
    "objective=grpo",
    "objective.max_new_tokens=8",
    "objective.num_prompts_per_step=4",
    "objective.num_generations_per_prompt=4",
    "objective.updates_per_rollout=2",
    "objective.generation_batch_size=4",
    "environment=arithmetic",
    "evaluation=reward",
]
RUNS = {
    "adamw": [*LM, "optimizer=adamw"],
    "muon and averages": [*LM, "optimizer=muon", "hparams.ema_decay=0.9"],
    "fp16": [*LM, "precision=amp_float16"],
    "bf16": [*LM, "precision=pure_bf16"],
    "recomputed": [*LM, "hparams.grad_checkpointing=true"],
    "one microbatch": [*LM, "hparams.per_gpu_batch_size=8"],
    "dropout": [*CHATS, "objective.hidden_dropout=0.2"],
    "packed": [*CHATS, "data.packing=true"],
    "diffusion": [*TINY_DIT, *QUIET],
    "answers": GRPO,
    "packed answers": [*GRPO, "data.packing=true"],
}


@pytest.fixture(autouse=True)
def _cache(cache, monkeypatch):
    monkeypatch.setenv("FOUNDRY_CACHE", str(cache))


class Forgetful(Transformer):
    """Scales its output by random numbers of torch and Python, and by a buffer that counts the forward passes."""

    shapes: ClassVar = []

    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, tokens, targets=None, **keywords):
        if self.training:
            self.shapes.append((tokens.shape, None if targets is None else "documents" in keywords))
            self.passes += 1
            keywords = {**keywords}
            noise = 1 + 0.01 * (random.random() + torch.rand(()) + self.passes)
            output = super().forward(tokens, targets, **keywords)
            return output if targets is None else replace(output, log_prob=output.log_prob * noise)
        return super().forward(tokens, targets, **keywords)


class Short(NextToken):
    """Raises the exception named `error` for rows of more than 16 tokens."""

    def __init__(self, *, error, **settings):
        super().__init__(**settings)
        self._error = error

    def loss(self, model, microbatch):
        if microbatch["tokens"].shape[-1] > 16:
            raise getattr(torch, self._error, ValueError)("Tried to allocate 3.00 GiB: rows are too long")
        return super().loss(model, microbatch)


class Sourced(NextToken):
    """Overrides `build_source`, although its source is the loader."""

    def build_source(self, context):
        return context.build_loader(False)


def own(config, part, kind, **settings):
    """Return the configuration with a part replaced by a class of this module."""
    node = {**vars(getattr(config, part)), "_target_": f"{__name__}.{kind.__name__}", **settings}
    return replace(config, **{part: node})


@pytest.mark.parametrize("name", some_of(RUNS, "muon and averages"))
def test_run_with_first_step_check_matches_a_run_without(tmp_path, caplog, name):
    for folder, switch in (("checked", ON), ("plain", OFF)):
        with caplog.at_level(logging.INFO):
            train(composition.configure(*RUNS[name], switch), tmp_path / folder)
    assert caplog.text.count("the first step fits") == 1
    assert outcome(tmp_path / "checked") == outcome(tmp_path / "plain")


@pytest.mark.parametrize("precision", some_of(["fp32", "amp_float16"], "fp32"))
def test_first_step_check_restores_buffers_and_generators(tmp_path, precision):
    outcomes = []
    for switch in (ON, OFF):
        Forgetful.shapes.clear()
        config = composition.configure(*CHATS, f"precision={precision}", switch)
        torch.manual_seed(3)
        random.seed(3)
        train(own(config, "model", Forgetful), tmp_path / switch)
        outcomes.append(outcome(tmp_path / switch))
    assert outcomes[0] == outcomes[1]


@pytest.mark.long
def test_resumed_run_is_checked_and_matches_a_run_without(tmp_path, caplog):
    words = [*RUNS["muon and averages"], "scheduler.horizon='4'"]
    for folder, switch in (("checked", ON), ("plain", OFF)):
        for steps in (2, 4):
            with caplog.at_level(logging.INFO):
                train(composition.configure(*words, f"hparams.max_steps={steps}", switch), tmp_path / folder)
    assert caplog.text.count("the first step fits") == 2
    assert outcome(tmp_path / "checked") == outcome(tmp_path / "plain")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(composition.configure(*words, "hparams.max_steps=4", ON), tmp_path / "checked")
    assert "the first step fits" not in caplog.text, "a finished run takes no step"


@pytest.mark.parametrize("packing", some_of([False, True], False))
def test_first_step_check_uses_the_largest_shape(tmp_path, packing):
    Forgetful.shapes.clear()
    config = composition.configure(*CHATS, f"data.packing={packing}", ON)
    train(own(config, "model", Forgetful), tmp_path / "run")
    (checked, again, *others) = Forgetful.shapes
    assert checked == again, "gradients of one microbatch lie next to the activations of another"
    assert checked == ((2, 192 if packing else checked[0][1]), packing)
    assert checked[0][1] >= max(shape[1] for shape, _ in others)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ("ValueError", ValueError, "rows are too long"),
        (
            "OutOfMemoryError",
            OutOfMemoryError,
            "out of CPU memory before the first step, in the check with the longest",
        ),
    ],
)
def test_failed_first_step_check_ends_the_run_before_training(tmp_path, error, kind, text):
    config = own(composition.configure(*LM, ON), "objective", Short, error=error)
    with pytest.raises(kind, match=text) as raised:
        train(config, tmp_path / "run")
    if kind is OutOfMemoryError:
        assert "hparams.per_gpu_batch_size=1: " in str(raised.value)
    assert list(metrics(tmp_path / "run")) == []
    assert list_checkpoints(tmp_path / "run") == []


def test_first_step_check_reserves_the_optimizer_state(tmp_path, monkeypatch):
    reserve, seen = FirstStepCheck._reserve_optimizer_state, []

    def noting(check):
        reserved = reserve(check)
        seen.append((check._trained.optimizers, sum(map(torch.Tensor.numel, reserved))))
        return reserved

    monkeypatch.setattr(FirstStepCheck, "_reserve_optimizer_state", noting)
    train(composition.configure(*LM, "optimizer=muon", ON), tmp_path / "run")
    ((optimizers, size),) = seen
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    assert size == sum(value.nbytes for value in states if torch.is_tensor(value) and value.ndim > 0) > 0


def test_first_step_check_skips_a_custom_window_source(tmp_path, caplog):
    config = own(composition.configure(*LM, "hparams.max_steps=1", ON), "objective", Sourced)
    with caplog.at_level(logging.INFO):
        train(config, tmp_path / "run")
    assert "the first step is not checked in advance: TypeError: Sourced builds its own window source" in caplog.text


FOUR_RANKS = ["distributed.nproc_per_node=4", "hparams.per_gpu_batch_size=1"]
STRATEGIES = {
    "fsdp": ["distributed=fsdp"],
    "ddp": ["distributed=ddp"],
    "ddp without accumulation": ["distributed=ddp", "hparams.per_gpu_batch_size=4"],
    "ddp of four ranks": [*FOUR_RANKS, "distributed=ddp", "distributed.bucket_cap_mb=0.01"],
    "ddp in one piece": ["distributed=ddp", "distributed.overlap_grad_reduce=false"],
    "ddp with a sharded optimizer": ["distributed=ddp", "distributed.shard_optimizer=true"],
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", some_of(STRATEGIES, "fsdp"))
def test_first_step_check_on_several_ranks_matches_a_run_without(tmp_path, cache, name):
    shell = WarmShell(tmp_path, cache)
    for folder, switch in (("checked", ON), ("plain", OFF)):
        words = [*RUNS["adamw"], "distributed.nproc_per_node=2", *STRATEGIES[name], switch]
        shell.run(*words, f"hydra.run.dir={folder}")
    assert "the first step fits" in (tmp_path / "checked" / "foundry.log").read_text()
    assert outcome(tmp_path / "checked") == outcome(tmp_path / "plain")
