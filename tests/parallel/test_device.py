"""Devices of the machine; GPUs are made up."""

import sys
from pathlib import Path

import pytest
import torch

from foundry.config.environment import STORE, detect
from foundry.config.errors import ConfigError
from foundry.parallel.device import peak_memory_bytes
from foundry.parallel.process_group import _device


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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
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
