"""Runs that benchmarks/kills.py kills at a few moments resume bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

DRIVER = Path(__file__).parents[2] / "benchmarks" / "kills.py"


# Few moments per objective: a kill costs two starts, and safety at any moment does not depend on the objective.
@pytest.mark.parametrize(
    ("case", "moments"),
    [("lm", ("any", "training", "save")), ("sft", ("save",)), ("lora", ("training",)), ("dpo", ("save",))],
)
def test_killed_run_resumes_bit_identical_to_an_uninterrupted_run(case, moments):
    words = ["--case", case, "--kills", str(len(moments)), "--moments", *moments]
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{case}: {len(moments)} kills, ")
    assert done.stdout.endswith("all bit-identical to an undisturbed run\n")
