"""Run a function on several ranks that share a real gloo process group.

The ranks fork from a server that has imported torch already, so a group of four starts in well under a second.
"""

import os
import pickle
import socket
import time
import traceback
from multiprocessing.connection import Connection, wait

from foundry.config.schemas.distributed import Distributed
from support.warm import CONTEXT, start_server


def spawn(function, world_size, *args, timeout_seconds=300.0, cuda=False):
    """Call `function(world, *args)` on every rank and return the results, rank by rank; over NCCL with `cuda`.

    Fails with the tracebacks of all ranks that raised; kills what is left after `timeout_seconds`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_server()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_child, args=(theirs, rank, world_size, port, cuda, function, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        outcomes = _collect(pipes, timeout_seconds)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    problems = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    assert not problems, "\n".join(problems)
    return [result for _, result in outcomes]


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[tuple[bool, object]]:
    outcomes = [(False, f"nothing heard within {timeout_seconds:g} s")] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout_seconds
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), remaining):
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, "ended without a word")
            if not outcomes[rank][0]:
                # Its peers fail soon, or hang in a collective.
                deadline = min(deadline, time.monotonic() + 5)
    return outcomes


def _child(pipe, rank, world_size, port, cuda, function, args):
    import torch

    from foundry.parallel.process_group import process_group

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        with process_group(Distributed(timeout_seconds=60.0), cuda=cuda) as world:
            outcome = (True, function(world, *args))
            world.barrier()
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()


def count_collectives(function):
    """Call `function()` and count the collectives that reach a process group, by the name of the c10d operator."""
    from collections import Counter

    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.counts = Counter()

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "c10d":
                self.counts[operator.name().removeprefix("c10d::").strip("_")] += 1
            return operator(*args, **(kwargs or {}))

    with Count() as mode:
        function()
    return dict(mode.counts)
