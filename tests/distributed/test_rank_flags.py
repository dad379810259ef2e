import os
import signal

import pytest
import torch
from support.harness import run_ranks, spawn

from foundry.parallel.process_group import World
from foundry.parallel.rank_flags import RankFlags
from foundry.training.signals import Boundary, SignalHandler

ALONE = World.single(torch.device("cpu"))


def test_rank_flags_of_one_process_are_returned_at_once():
    rank_flags = RankFlags(ALONE)
    assert [rank_flags.exchange(flags) for flags in (0, 5, 0)] == [0, 5, 0]
    assert rank_flags.settle(9) == 9


def interrupted_at_step_three(world, interrupted_rank):
    rank_flags = RankFlags(world)
    with SignalHandler() as signals:
        seen = []
        for step in range(6):
            if step == 3 and world.rank == interrupted_rank:
                os.kill(os.getpid(), signal.SIGUSR1)
            seen.append(rank_flags.exchange(signals.flags))
        requested = signals.requested
    return seen, requested


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "interrupted_rank"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.long)])
def test_signal_to_one_rank_reaches_all_ranks_one_call_later(world_size, interrupted_rank):
    stop = int(Boundary.STOP_USR1)
    answers = spawn(interrupted_at_step_three, world_size, interrupted_rank)
    assert [seen for seen, _ in answers] == [[0, 0, 0, 0, stop, stop]] * world_size
    assert [rank for rank, (_, requested) in enumerate(answers) if requested] == [interrupted_rank]


def different_flags(world):
    rank_flags = RankFlags(world)
    seen = [rank_flags.exchange(1 << world.rank)]
    seen.append(rank_flags.exchange(8 if world.rank == 1 else 0))
    seen.append(rank_flags.settle(16 if world.rank == 0 else 0))
    seen.append(rank_flags.settle(0))
    seen.append(rank_flags.exchange(1 << 62 if world.rank == 0 else 0))
    seen.append(rank_flags.settle(0))
    # RankFlags uses the process group of training, whose own collectives run in between.
    total = int(world.all_reduce_sum(torch.tensor(world.rank)))
    return seen, total


@pytest.mark.distributed
def test_rank_flags_are_combined_and_cleared_by_settle():
    for seen, total in run_ranks(different_flags, 2):
        assert seen == [0, 1 | 2, 8 | 16, 0, 0, 1 << 62]
        assert total == 1


def one_rank_leaves(world):
    rank_flags = RankFlags(world)
    rank_flags.exchange(0)
    world.barrier()
    if world.rank == 1:
        os._exit(0)
    rank_flags.settle(0)


@pytest.mark.distributed
def test_rank_flags_raise_an_error_if_a_rank_has_exited():
    with pytest.raises(AssertionError, match=r"Connection (closed|reset) by peer"):
        spawn(one_rank_leaves, 2, timeout_seconds=20)
