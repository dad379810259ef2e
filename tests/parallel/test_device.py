"""Devices of the machine; GPUs are made up."""

import sys
from pathlib import Path

import pytest
import torch
from support.devices import FakeGpus

from foundry.config.environment import STORE, detect
from foundry.config.errors import ConfigError
from foundry.config.schemas.distributed import Single
from foundry.parallel.device import free_memory, host_capacity, peak_memory_bytes, resident_bytes
from foundry.parallel.process_group import _device, process_group


@pytest.mark.parametrize(
    ("count", "variables", "index"),
    [
        (8, {}, 1),
        (1, {"CUDA_VISIBLE_DEVICES": "1"}, 0),  # as a script does that starts a process for each GPU
        (1, {}, None),
        (1, {"CUDA_VISIBLE_DEVICES": "1", STORE: "somewhere"}, None),  # foundry's own processes would share it
    ],
)
def test_the_only_visible_gpu_is_its_own_where_somebody_chose_it(monkeypatch, count, variables, index):
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {**place, "MASTER_PORT": "29500", **variables}.items():
        monkeypatch.setenv(name, value)
    FakeGpus(count=count).replace_torchs(monkeypatch)
    if index is None:
        with pytest.raises(ConfigError, match="this node has 1 GPUs"):
            _device(detect(), cuda=True)
    else:
        assert _device(detect(), cuda=True) == torch.device("cuda", index)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says it elsewhere too")
def test_the_memory_of_a_process_is_in_bytes():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    _, kibibytes, unit = line.split()
    assert unit == "kB"
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(int(kibibytes) * 1024, rel=0.01)


def test_resident_memory_falls_when_memory_is_freed_and_its_peak_does_not():
    before, block = resident_bytes(), bytearray(b"x" * 2**28)
    held = resident_bytes()
    peak = peak_memory_bytes(torch.device("cpu"))
    del block
    assert held > before + 2**27
    assert resident_bytes() < held - 2**27
    assert peak_memory_bytes(torch.device("cpu")) >= peak >= held


def test_peak_memory_of_a_run_leaves_out_the_run_before_it(monkeypatch):
    gpus = FakeGpus(peak=60, allocated=0).replace_torchs(monkeypatch)
    with process_group(Single()) as world:
        assert peak_memory_bytes(world.device) == 0
        gpus.peak = 40
        assert peak_memory_bytes(world.device) == 40


def test_cached_memory_of_this_process_is_free_and_that_of_others_is_not(monkeypatch):
    FakeGpus(total=100, free=30, allocated=20, reserved=45).replace_torchs(monkeypatch)
    assert free_memory(torch.device("cuda", 0), 8) == 30 + 25
    assert free_memory(torch.device("cpu"), 4) == host_capacity() // 4
