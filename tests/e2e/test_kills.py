"""The kills of benchmarks/kills.py, a few of them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

DRIVER = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.parametrize("case", ["lm", "sft", "lora", "dpo"])
def test_a_run_that_is_killed_three_times_ends_as_if_undisturbed(case):
    done = subprocess.run(
        [sys.executable, str(DRIVER), "--case", case, "--kills", "3"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{case}: 3 kills, ")
    assert done.stdout.endswith("all bit-identical to an undisturbed run\n")
