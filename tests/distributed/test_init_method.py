"""Ranks rendezvous at `distributed.init_method`, not at the address in the launcher's variables."""

import os

import pytest
import torch
from support.harness import CONTEXT, start_server
from support.run_events import free_port

from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import Distributed
from foundry.parallel.process_group import process_group


def meet(pipe, rank, method, port):
    """Join the other rank and send a sum over both ranks to the pipe; their different MASTER_PORTs are not used."""
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in named.items()} | {"MASTER_ADDR": "127.0.0.1"}
    settings = Distributed(init_method=method, timeout_seconds=60.0, start_timeout_seconds=20.0)
    with process_group(settings, DeviceKind.cpu):
        total = torch.tensor([rank + 1.0])
        torch.distributed.all_reduce(total)
        pipe.send(total.item())


def sums(method):
    start_server()
    found, processes = [], []
    for rank in range(2):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=meet, args=(theirs, rank, method, free_port()), daemon=True)
        process.start()
        theirs.close()
        found.append(ours)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in found]
    finally:
        for process in processes:
            process.join(20)
            process.kill()


@pytest.mark.parametrize("method", ["tcp://127.0.0.1:{port}", "file://{folder}/meet"])
def test_ranks_rendezvous_at_init_method(method, tmp_path):
    method = method.format(port=free_port(), folder=tmp_path)
    assert sums(method) == [3.0, 3.0]


@pytest.mark.long
def test_init_method_file_is_reusable_by_later_runs(tmp_path):
    assert [sums(f"file://{tmp_path}/meet") for _ in range(2)] == [[3.0, 3.0]] * 2
