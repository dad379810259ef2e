"""Run a function on several ranks that share a real gloo process group.

`run_ranks` calls it on ranks that stay alive between tests; `spawn` starts ranks for one call. Use `spawn` if the
function kills a rank, replaces signal handlers, sets an attribute of a module or compiles, if it measures memory, open
files or the flight recorder, or if the ranks use CUDA.

Ranks fork from a server that has imported torch already. Each call joins a new process group.
"""

import gc
import logging
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import Distributed
from support.warm import CONTEXT, start_server

_pools: dict[int, "Ranks"] = {}


def run_ranks(function, world_size, *args, timeout_seconds=300.0):
    """Call `function(world, *args)` on every rank and return the results, rank by rank.

    The ranks serve later calls of the same `world_size`, unless this call fails or times out.

    Raises:
        AssertionError: with the tracebacks of all ranks that raised.
    """
    ranks = _pools.pop(world_size, None)
    if ranks is None or not ranks.are_alive():
        ranks = Ranks(world_size)
    results = ranks.call(function, args, timeout_seconds)
    _pools[world_size] = ranks
    return results


def spawn(function, world_size, *args, timeout_seconds=300.0, cuda=False):
    """Call `function(world, *args)` as `run_ranks` does, on new ranks that then end; over NCCL with `cuda`."""
    ranks = Ranks(world_size, cuda=cuda)
    results = ranks.call(function, args, timeout_seconds)
    ranks.stop()
    return results


class Ranks:
    """Processes that execute calls until their pipes close; a failed call ends all of them."""

    def __init__(self, world_size, *, cuda=False):
        start_server()
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs, rank, world_size, cuda), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def are_alive(self):
        return all(process.is_alive() for process in self.processes)

    def call(self, function, args, timeout_seconds):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Pickled twice, because `function` can be imported only with the sys.path of the tests.
        request = pickle.dumps((sys.path, port, pickle.dumps((function, args))))
        try:
            for pipe in self.pipes:
                pipe.send_bytes(request)
            outcomes = _collect(self.pipes, timeout_seconds)
            problems = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
            assert not problems, "\n".join(problems)
        except BaseException:
            self.stop(patience_seconds=0.0)
            raise
        return [result for _, result in outcomes]

    def stop(self, patience_seconds=5.0):
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + patience_seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[tuple[bool, object]]:
    outcomes = [(False, f"nothing heard within {timeout_seconds:g} s")] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout_seconds
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), remaining):
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                outcomes[rank] = (False, "ended without a word")
            if not outcomes[rank][0]:
                # The other ranks fail soon, or hang in a collective.
                deadline = min(deadline, time.monotonic() + 5)
    return outcomes


def _serve(pipe, rank, world_size, cuda):
    """Execute calls until the pipe closes or a call fails: peers notice a failure when this process ends."""
    import torch

    torch.set_num_threads(1)
    is_ok = True
    while is_ok:
        try:
            path, port, request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path
        with _restored_state():
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            is_ok, outcome = _execute(request, cuda)
        pipe.send_bytes(outcome)


def _execute(request, cuda):
    """Return whether the call succeeded, and its pickled outcome."""
    from foundry.parallel.process_group import process_group

    try:
        with process_group(Distributed(timeout_seconds=60.0), DeviceKind.cuda if cuda else DeviceKind.cpu) as world:
            function, args = pickle.loads(request)
            outcome = pickle.dumps((True, function(world, *args)))
            world.barrier()
        return True, outcome
    except BaseException:
        return False, pickle.dumps((False, traceback.format_exc()))


@contextmanager
def _restored_state():
    """Restore the global state of torch, Python and the process, and forget the process groups."""
    import numpy
    import torch

    accessors = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_rng_state, torch.set_rng_state),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (random.getstate, random.setstate),
        (numpy.random.get_state, numpy.random.set_state),
        (os.getcwd, os.chdir),
    ]
    before = [(put, get()) for get, put in accessors]
    environment, filters = dict(os.environ), list(warnings.filters)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    loggers = {logger: (logger.level, list(logger.handlers)) for logger in _loggers()}
    yield
    for put, value in before:
        put(value)
    os.environ.clear()
    os.environ |= environment
    warnings.filters[:] = filters
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for logger in _loggers():
        level, handlers_before = loggers.get(logger, (logging.NOTSET, []))
        logger.setLevel(level)
        logger.handlers[:] = handlers_before
    _forget_groups()


def _loggers():
    return [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)] + [
        logging.root
    ]


def _forget_groups():
    """Clear the caches of torch keyed by device mesh: an equal mesh of the next call has new process groups."""
    import ctypes

    import torch
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    torch._dynamo.reset()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def count_collectives(function):
    """Call `function()` and count the collectives that reach a process group, by the name of the c10d operator."""
    with recorded_collectives() as operations:
        function()
    return dict(Counter(name for name, _ in operations))


@contextmanager
def recorded_collectives():
    """Yield a list that records the collectives of this rank: name of the c10d operator, and dtype of the input."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    operations = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "c10d":
                *_, tensor = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
                operations.append((operator.name().removeprefix("c10d::").strip("_"), tensor.dtype))
            return operator(*args, **(kwargs or {}))

    with Record():
        yield operations
