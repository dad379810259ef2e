"""tests/mutate_fields.py finds settings without test coverage."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SOURCE = """
from torch import nn

from foundry.config.build import build
from foundry.config.schemas.optimizer import AdamW
from foundry.config.schemas.peft import LoRA
from foundry.models.lora import add_adapters


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_of_a_reader():
    model = net()
    add_adapters(model, LoRA(target_modules=["0"], adapter_dim=2), seed=0)
    assert model[0].lora_A.default.weight.shape == (2, 4)


def test_of_a_part():
    (optimizer,) = build(AdamW(beta1=0.5, eps=1e-3), model=net(), lr=1e-3)
    assert optimizer.param_groups[0]["betas"][0] == 0.5


def test_of_values_alone():
    assert (AdamW(eps=1e-3).eps, LoRA(alpha=7).alpha) == (1e-3, 7)
"""


@pytest.mark.long
def test_ignored_field_is_noticed_only_by_tests_that_use_it_in_a_run(tmp_path):
    own = tmp_path / "tests"
    shutil.copytree(TESTS / "support", own / "support")
    shutil.copy(TESTS / "mutate_fields.py", own)
    shutil.copy(TESTS.parent / "setup.cfg", tmp_path)
    (tmp_path / "foundry").symlink_to(TESTS.parent / "foundry")
    (own / "test_own.py").write_text(SOURCE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*words):
        command = [sys.executable, str(own / "mutate_fields.py"), "--folder", str(tmp_path / "found"), *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("record", "-n", "0", "-q", "-p", "no:cacheprovider")
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    run("try", "LoRA.adapter_dim", "LoRA.alpha", "Adam.beta1", "Adam.eps")
    lines = [json.loads(line) for line in (tmp_path / "found" / "results.jsonl").read_text().splitlines()]
    results = {line["key"]: (line["result"], line.get("test", "").rpartition("::")[2]) for line in lines}
    assert results == {
        "LoRA.adapter_dim": ("noticed", "test_of_a_reader"),
        "LoRA.alpha": ("unused", ""),
        "Adam.beta1": ("noticed", "test_of_a_part"),
        "Adam.eps": ("unnoticed", ""),
    }
    assert "Adam.eps: unnoticed after 1 tests" in run("report").stdout
