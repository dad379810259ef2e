"""GPU tests run on a fake GPU, so that their code is tested on machines without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundry.rehearsal.guard import reason_not_to_load

TESTS = Path(__file__).parents[1]
FILES = [
    "checkpoint/test_rng.py",
    "checkpoint/test_shard.py",
    "distributed/test_gpu_ranks.py",
    "e2e/test_device_runs.py",
    "models/test_kernels.py",
    "training/test_guards.py",
    "training/test_no_sync.py",
    "training/test_throughput.py",
]


@pytest.mark.long
@pytest.mark.skipif(reason_not_to_load() is not None, reason=str(reason_not_to_load()))
def test_gpu_tests_pass_on_a_fake_gpu():
    options = ["-p", "support.fake_gpus", "-p", "no:cacheprovider", "-n", "0", "-q", "-m", "gpu", "-rA", "--no-header"]
    command = [sys.executable, "-m", "pytest", *options, *(str(TESTS / name) for name in FILES)]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, cwd=TESTS.parent, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(lines[-60:])
    passed = {line.split("::")[-1].partition("[")[0] for line in lines if line.startswith("PASSED")}
    assert passed >= {
        "test_ten_accumulated_steps_wait_for_nothing",
        "test_attention_with_fewer_heads_of_keys_is_one_kernel",
    }
