"""`PYTHONPATH=tests pytest -p support.fake_gpus -n 0 -m gpu FILE...`: run GPU tests on a fake GPU.

Host waits, shapes and memory are as on a GPU. Tests that need numbers, CUDA's own kernels or several processes are
skipped.
"""

from foundry.rehearsal.guard import load_guard

load_guard()

import pytest  # noqa: E402

from foundry.rehearsal.device_dispatch import DeviceDispatch  # noqa: E402
from foundry.rehearsal.fake_cuda import fake_cuda  # noqa: E402
from foundry.rehearsal.machine import GPUS  # noqa: E402

NUMBERS, KERNELS, PROCESSES = (
    "needs numbers, which fake tensors do not have",
    "needs CUDA's own kernels",
    "starts processes that do not have the fake GPU",
)
NEEDS = {
    "checkpoint/test_shard.py": NUMBERS,
    "distributed/test_gpu_ranks.py": PROCESSES,
    "e2e/test_device_runs.py": NUMBERS,
    "training/test_guards.py": NUMBERS,
    "test_a_norm_makes_no_copy_in_float32": KERNELS,
}
"""Reasons for skips, by suffix of the file path or by test name."""


def pytest_collection_modifyitems(items):
    for item in items:
        for name, reason in NEEDS.items():
            if item.path.as_posix().endswith(name) or item.originalname == name:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with fake_cuda(GPUS["h100"], 1, DeviceDispatch(ranks_per_node=1)):
        return (yield)
