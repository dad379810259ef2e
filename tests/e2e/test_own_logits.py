"""A model that returns logits trains with the metrics and samples of one that returns log-probabilities."""

import json

import pytest
from support.in_process import Commands

OWN = r"""
import torch
from torch import nn

from foundry.models.token_log_probs import read_log_probs


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.out(torch.relu(self.norm(x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])))


class Logits(nn.Module):
    def __init__(self, *, vocab_size, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LogProbs(Logits):
    def forward(self, tokens, targets=None, **asked):
        return read_log_probs(super().forward(tokens), targets, **asked)


class WithLoss(Logits):
    def forward(self, tokens, targets=None):
        logits = super().forward(tokens)
        return logits, logits.mean()
"""
SMALL = [
    "--config-dir=conf",
    "debug=fast",
    "data.seq_len=32",
    "hparams.global_batch_size=8",
    "evaluation.max_samples=8",
    "tracking.plots=false",
    "tracking.log_every_n_steps=1",
]
SAMPLES = "objective.sample_tokens=8"
ARITHMETIC = ["data=arithmetic", "data.num_rows=64", "data.seq_len=160"]
ROLLOUTS = [
    "objective.num_prompts_per_step=2",
    "objective.num_generations_per_prompt=4",
    "objective.max_new_tokens=4",
    "environment=exact_match",
]
OBJECTIVES = {
    "next_token": [SAMPLES, "objective.z_loss_coefficient=1e-3"],
    "sft": ["objective=sft", "data.form=chats", *ARITHMETIC, SAMPLES],
    "dpo": ["objective=dpo", "data.form=preferences", *ARITHMETIC],
    "dpo_of_a_copy": ["objective=dpo", "data.form=preferences", "objective.reference=copy", *ARITHMETIC],
    "grpo": [
        "objective=grpo",
        "evaluation=reward",
        "data.form=prompts",
        *ARITHMETIC,
        *ROLLOUTS,
        "objective.generation_temperature=0.9",
        "objective.logprob_chunk_size=7",
    ],
    "distillation": [
        "objective=distillation",
        "objective.teacher=next_token",
        "objective.teacher_trust=true",
        "objective.max_seq_len=32",
    ],
}


@pytest.fixture
def run_command(tmp_path, cache):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    for option, kind in {"logits": "Logits", "log_probs": "LogProbs", "with_loss": "WithLoss"}.items():
        text = f"_target_: own.{kind}\nvocab_size: ${{data.vocab_size}}\nwidth: 16\n"
        (tmp_path / "conf" / "model" / f"{option}.yaml").write_text(text)
    return Commands(tmp_path, cache, {"PYTHONPATH": "."})


def numbers(run_dir):
    """Return the metrics of each step and evaluation without times and memory."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [
        {key: value for key, value in line.items() if not any(word in key for word in ("second", "bytes", "time"))}
        for line in lines
    ]


@pytest.mark.parametrize(
    "name", [name if name == "next_token" else pytest.param(name, marks=pytest.mark.long) for name in OBJECTIVES]
)
def test_model_with_logits_matches_a_model_with_log_probabilities(run_command, name):
    overrides = OBJECTIVES[name]
    if name == "distillation":
        run_command(*SMALL, SAMPLES, "model=logits", "hydra.run.dir=next_token")
    for model in ("logits", "log_probs"):
        tile = ["objective.logprob_chunk_size=null"] if (name, model) == ("grpo", "log_probs") else []
        run_command(*SMALL, *overrides, *tile, f"model={model}", f"hydra.run.dir={model}")
    ours, expected = (numbers(run_command.cwd / model) for model in ("logits", "log_probs"))
    assert len(ours) > 3
    assert ours == expected
    if SAMPLES in overrides:
        ours, expected = ((run_command.cwd / m / "plots" / "samples.txt").read_text() for m in ("logits", "log_probs"))
        assert ours == expected


def test_model_that_also_returns_its_loss_is_refused(run_command):
    _, stderr = run_command(*SMALL, SAMPLES, "model=with_loss", "hydra.run.dir=run", code=2)
    message = "model: is WithLoss, whose forward() returns a tuple (a tensor of shape (4, 32, 4096), a scalar)"
    assert stderr.splitlines()[-1].startswith(message)


@pytest.mark.long
def test_finished_run_of_a_model_with_logits_is_sampled(run_command):
    run_command(*SMALL, SAMPLES, "model=logits", "hydra.run.dir=run")
    stdout, _ = run_command("run=run", "trust=true", "prompt=the", "max_new_tokens=5", module="foundry.sample")
    assert "the" in stdout
