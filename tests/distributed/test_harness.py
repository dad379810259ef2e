"""Reusable test ranks: a failed call ends the ranks, and a call leaves no state for the next call."""

import logging
import os
import random
import signal
import sys
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from support.harness import Ranks, run_ranks, spawn

pytestmark = pytest.mark.distributed


def process_id(world):
    return os.getpid()


@pytest.mark.long
def test_calls_share_ranks_unless_fresh_ones_are_started():
    first = run_ranks(process_id, 2)
    assert run_ranks(process_id, 2) == first
    assert not set(spawn(process_id, 2)) & set(first)


def fail(world, ranks):
    if world.rank in ranks:
        raise ValueError(f"from rank {world.rank}")
    world.barrier()


def leave(world):
    if world.rank == 1:
        os._exit(3)
    world.barrier()


def hang(world):
    if world.rank == 1:
        time.sleep(100)


def return_lambda(world):
    return lambda: None


@pytest.mark.parametrize("call", [run_ranks, pytest.param(spawn, marks=pytest.mark.long)])
def test_failure_reports_tracebacks_of_all_ranks(call):
    with pytest.raises(AssertionError, match=r"(?s)rank 0: Traceback.*from rank 0.*rank 1: Traceback.*from rank 1"):
        call(fail, 2, (0, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (fail, ((1,),), "rank 1: Traceback.*ValueError: from rank 1"),
        (leave, (), "rank 1: ended without a word"),
        (hang, (), "rank 1: nothing heard within 2 s"),
        (return_lambda, (), "rank 0: Traceback.*[Pp]ickl"),
    ],
)
def test_next_call_after_a_failure_has_new_ranks(function, args, message):
    before = run_ranks(process_id, 2)
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        run_ranks(function, 2, *args, timeout_seconds=2)
    assert not set(run_ranks(process_id, 2)) & set(before)


@pytest.mark.long
def test_ranks_killed_between_calls_are_replaced():
    before = run_ranks(process_id, 2)
    os.kill(before[1], signal.SIGKILL)
    time.sleep(0.2)
    assert not set(run_ranks(process_id, 2)) & set(before)


def global_state(world):
    """Return all global state that a call could change; random numbers are drawn by this call."""
    import numpy

    names = ("MASTER_PORT",)  # Differs for every call.
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": (torch.rand(1).item(), random.random(), numpy.random.rand()),
        "deterministic": torch.get_deterministic_debug_mode(),
        "matmul": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "environment": {name: value for name, value in os.environ.items() if name not in names},
        "folder": Path.cwd(),
        "path": list(sys.path),
        "signal": str(signal.getsignal(signal.SIGUSR1)),
        "warnings": len(warnings.filters),
        "loggers": [(len(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in ("", "foundry")],
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
    }


def disturb(world, folder):
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.manual_seed(1)
    random.seed(1)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    os.environ["DISTURBED"] = "1"
    del os.environ["PATH"]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    signal.signal(signal.SIGUSR1, lambda *_: None)
    warnings.simplefilter("error")
    logging.getLogger("foundry").addHandler(logging.NullHandler())
    logging.getLogger().setLevel(logging.DEBUG)
    torch.distributed.new_group([1])
    init_device_mesh("cpu", (2, world.world_size // 2))


def test_global_state_is_restored_after_a_call(tmp_path):
    ranks = Ranks(2)
    calls = [(process_id, ()), (global_state, ()), (disturb, (tmp_path,)), (global_state, ())]  # The first one imports.
    _, before, _, after = [ranks.call(*call, timeout_seconds=60.0) for call in calls]
    ranks.stop()
    pairs = [(one[name], other[name]) for one, other in zip(before, after, strict=True) for name in one]
    assert [pair for pair in pairs if pair[0] != pair[1]] == []


def sum_along_mesh(world, num_extra_groups):
    """Sum a DTensor over one mesh dimension; the extra groups change the names that torch gives to mesh groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    for rank in range(num_extra_groups):
        torch.distributed.new_group([rank])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    partial = DTensor.from_local(torch.tensor([float(world.rank)]), mesh, [Replicate(), Partial()])
    doubled = (partial * 2).redistribute(mesh, [Replicate(), Replicate()])
    return doubled.to_local().tolist()


def test_device_meshes_of_an_earlier_call_are_forgotten():
    expected = [[2.0], [2.0], [10.0], [10.0]]
    for num_extra_groups in (0, 4, 0):
        assert run_ranks(sum_along_mesh, 4, num_extra_groups) == expected


LEFT = []


def leave_in_a_cycle(world):
    cycle = [torch.ones(3)]
    cycle.append(cycle)
    LEFT.append(weakref.ref(cycle[0]))


def is_freed(world):
    return LEFT.pop()() is None


def test_memory_of_a_call_is_freed():
    run_ranks(leave_in_a_cycle, 2)
    assert run_ranks(is_freed, 2) == [True, True]


def was_loaded(world, module):
    return module in sys.modules


def test_ranks_fork_from_a_process_that_has_imported_everything():
    assert spawn(was_loaded, 1, "sklearn.datasets") == [True]
