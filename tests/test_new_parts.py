"""A new part needs a Python file, a schema, a YAML file and a test: here tests add parts to a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import TINY_LM

from foundry.config.composition.compose import config_dir

REPOSITORY = Path(__file__).resolve().parent.parent

SCHEDULE = '''"""A learning rate that is constant and then halved."""

from dataclasses import dataclass

from foundry.optim.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Halved(Schedule):
    """Half of the peak from `share` of the horizon on."""

    share: float

    def after_warmup(self, samples):
        return self.max_lr * (1.0 if samples < self.share * self.horizon else 0.5)

    def phases(self):
        return [("warmup", self.warmup), ("whole", self.share * self.horizon), ("half", float("inf"))]
'''
SCHEDULE_SCHEMA = '''"""A rate that is halved."""

from dataclasses import dataclass

from foundry.config.schemas.scheduler import Scheduler
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Halved(Scheduler):
    """Constant, then half of it."""

    _target_: str = "foundry.optim.halved.Halved.from_durations"
    share: float = setting(0.5, "share of the horizon after which the rate is halved", gt=0, lt=1)
'''
OBJECTIVE = '''"""Cross-entropy of the next token, times a factor."""

from foundry.objectives.next_token import NextToken
from foundry.core.protocols import LossSum


class Scaled(NextToken):
    """Next-token loss times `factor`."""

    def __init__(self, *, factor):
        super().__init__()
        self.factor = factor

    def loss(self, model, microbatch):
        return LossSum(super().loss(model, microbatch).loss * self.factor)
'''
OBJECTIVE_SCHEMA = '''"""Next-token loss times a factor."""

from dataclasses import dataclass
from typing import ClassVar

from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Next-token loss times a factor."""

    wants: ClassVar[frozenset[str]] = frozenset({"tokens"})
    loss_functions: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    metrics: ClassVar[tuple[str, ...]] = ()

    _target_: str = "foundry.objectives.scaled.Scaled"
    factor: float = setting(2.0, "factor of the loss", gt=0)
'''
DATA = '''"""Sequences that count."""

import torch

from foundry.data.splits import DataSplits


def counting(*, seed, num_workers, cache_dir, seq_len, vocab_size, pace):
    rows = (torch.arange(64)[:, None] + pace * torch.arange(seq_len + 1)) % vocab_size
    samples = [{"tokens": row[:-1], "targets": row[1:]} for row in rows]
    return DataSplits(train=samples[8:], validation=samples[:8], fingerprint=f"{pace}", tokens_per_sample=seq_len)
'''
DATA_SCHEMA = '''"""Sequences that count."""

from dataclasses import dataclass
from typing import ClassVar

from foundry.config.schemas.data.base import Data
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Counting(Data):
    """Sequences that count modulo the vocabulary."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens"})

    _target_: str = "foundry.data.counting.counting"
    seq_len: int = setting(32, "tokens per sequence", ge=1)
    vocab_size: int = setting(64, "entries", ge=2)
    pace: int = setting(1, "difference between consecutive tokens", ge=1)
'''
EVALUATOR = '''"""The norm of all weights."""

import torch


class WeightNorm:
    """Measures `weight_norm`."""

    metrics = ("weight_norm",)

    def evaluate(self, model, context):
        return {"weight_norm": torch.cat([p.flatten() for p in model.parameters()]).norm().item()}
'''
TRACKER = '''"""A line for each logged step."""


class Lines:
    """Writes `lines.txt`."""

    def __init__(self, *, run_dir, prefix):
        self.path, self.prefix = run_dir / "lines.txt", prefix

    def on_step(self, event):
        with self.path.open("a") as file:
            file.write(f"{self.prefix} {event.step}\\n")
'''
# For each part: group, option, schema name, Python file and its text, schema file and its text.
PARTS = [
    ("scheduler", "halved", "Halved", "optim/halved.py", SCHEDULE, "scheduler/halved.py", SCHEDULE_SCHEMA),
    ("objective", "scaled", "Scaled", "objectives/scaled.py", OBJECTIVE, "objective/scaled.py", OBJECTIVE_SCHEMA),
    ("data", "counting", "Counting", "data/counting.py", DATA, "data/counting.py", DATA_SCHEMA),
]
WORDS = [
    *TINY_LM[:6],
    "scheduler=halved",
    "objective=scaled",
    "data=counting",
    "evaluation.write_samples=false",
    "evaluation=judged",
    "tracking=lines",
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the package and its options, with new parts in five groups."""
    root = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "foundry", root / "foundry", ignore=ignored)
    shutil.copytree(config_dir(), root / "conf", ignore=ignored)
    for group, option, schema, file, text, schema_file, schema_text in PARTS:
        (root / "foundry" / file).write_text(text)
        (root / "foundry" / "config" / "schemas" / schema_file).write_text(schema_text)
        option_file = root / "conf" / group / f"{option}.yaml"
        option_file.write_text(f"# A new part.\ndefaults: [/schema/{group}/{schema}@_here_]\n")
    (root / "foundry" / "evaluators" / "weight_norm.py").write_text(EVALUATOR)
    (root / "conf" / "evaluation" / "judged.yaml").write_text(
        "# The norm of the weights decides.\ndefaults: [default]\nmetric: val_weight_norm\n"
        "evaluators: {weights: {_target_: foundry.evaluators.weight_norm.WeightNorm, metrics: [weight_norm]}}\n"
    )
    (root / "foundry" / "tracking" / "lines.py").write_text(TRACKER)
    (root / "conf" / "tracking" / "lines.yaml").write_text(
        "# A line for each logged step.\ndefaults: [none]\n"
        "trackers: {lines: {_target_: foundry.tracking.lines.Lines, prefix: step}}\n"
    )
    return root


def foundry(checkout, *overrides, module="foundry"):
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *overrides]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_new_parts_train_and_resume(checkout):
    done = foundry(checkout, *WORDS, "hparams.max_steps=4", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (checkout / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates[0] == 2 * rates[-1]
    assert lines[0]["loss"] > 1.5 * 4.15, "twice ln 64, nearly"
    result = json.loads((checkout / "run" / "result.json").read_text())
    assert result["metric"] == result["val_weight_norm"] > 0
    assert result["val_loss"] > 0
    assert (checkout / "run" / "lines.txt").read_text().splitlines()[-1] == "step 4"
    plan = json.loads((checkout / "run" / "plan.json").read_text())
    assert [phase["name"] for phase in plan["phases"]][-2:] == ["whole", "half"]
    refused = foundry(checkout, *WORDS, "hparams.max_steps=8", "hydra.run.dir=run", "objective.factor=3")
    assert refused.returncode == 2
    assert "objective.factor: is 3 but" in refused.stderr


def test_settings_of_new_parts_are_checked(checkout):
    done = foundry(checkout, *WORDS, "scheduler.shar=1", "objective.factor=0", "data.pace=x")
    assert done.returncode == 2
    assert [line.partition(": ")[0] for line in sorted(done.stderr.splitlines())] == [
        "data.pace",
        "objective.factor",
        "scheduler.shar",
    ]
