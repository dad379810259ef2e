"""Which GPU is a process's own; the machine's GPUs are made up, the rest is real."""

import pytest
import torch

from foundry.config.environment import STORE, detect
from foundry.config.errors import ConfigError
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
