"""The kills of benchmarks/kills.py, a few of them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

DRIVER = Path(__file__).parents[2] / "benchmarks" / "kills.py"


# A kill costs two starts; that a run can be killed at any moment does not depend on the objective.
@pytest.mark.parametrize(
    ("case", "moments"),
    [("lm", ("any", "training", "save")), ("sft", ("save",)), ("lora", ("training",)), ("dpo", ("save",))],
)
def test_a_run_that_is_killed_ends_as_if_undisturbed(case, moments):
    words = ["--case", case, "--kills", str(len(moments)), "--moments", *moments]
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{case}: {len(moments)} kills, ")
    assert done.stdout.endswith("all bit-identical to an undisturbed run\n")
