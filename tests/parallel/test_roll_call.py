import threading
import time
from contextlib import ExitStack

import pytest
from torch.distributed import FileStore, PrefixStore

from foundry.parallel.roll_call import RollCall

SECONDS = 0.02


@pytest.fixture
def ranks(tmp_path):
    """Three ranks of one run."""
    stores = [PrefixStore("run", FileStore(str(tmp_path / "store"), 3)) for _ in range(3)]
    return [RollCall(store, rank=rank, world_size=3, seconds=SECONDS, host=None) for rank, store in enumerate(stores)]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(SECONDS)


def test_who_does_not_answer_is_silent_and_the_others_say_where_they_are(ranks):
    ranks[1].note(5, "training")
    with ranks[0], ranks[1]:
        assert ranks[0].silent == []
        ranks[0].ask()
        wait_until(lambda: ranks[0].silent == [2])
        assert ranks[0].answers == {1: (5, "training")}
        ranks[1].ask()
        wait_until(lambda: ranks[1].silent == [2])


def test_an_answer_of_an_earlier_round_is_none(ranks):
    with ranks[0]:
        with ranks[1], ranks[2]:
            ranks[0].ask()
            wait_until(lambda: len(ranks[0].answers) == 2)
        ranks[0].ask()
        wait_until(lambda: ranks[0].silent == [1, 2])
        time.sleep(5 * SECONDS)
        assert ranks[0].silent == [1, 2]


def test_nothing_is_written_while_nobody_asks(ranks, tmp_path):
    store = tmp_path / "store"
    with ExitStack() as entered:
        for rank in ranks:
            entered.enter_context(rank)
        size = store.stat().st_size
        time.sleep(20 * SECONDS)
        assert store.stat().st_size == size


@pytest.mark.parametrize(("host", "silent"), [(0, [0]), (None, [])])
def test_a_store_that_does_not_answer_is_its_hosts_fault(tmp_path, monkeypatch, host, silent):
    rank = RollCall(FileStore(str(tmp_path / "store"), 1), rank=1, world_size=2, seconds=SECONDS, host=host)
    over = threading.Event()
    monkeypatch.setattr(rank, "_look", over.wait)
    with rank:
        rank.ask()
        time.sleep(5 * SECONDS)
        assert rank.silent == silent
        over.set()


def test_all_who_are_asked_are_told(tmp_path):
    stores = [PrefixStore("run", FileStore(str(tmp_path / "store"), 2)) for _ in range(2)]
    told = [threading.Event() for _ in stores]
    first, second = (
        RollCall(store, rank=rank, world_size=2, seconds=SECONDS, host=None, when_asked=told[rank].set)
        for rank, store in enumerate(stores)
    )
    with first, second:
        assert not told[0].is_set()
        second.ask()
        assert all(one.wait(20) for one in told)
