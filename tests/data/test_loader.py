"""Data loader workers that die."""

import multiprocessing
import os
import re
import signal
import time

import pytest
import torch

from foundry.data.loader import DataWorkerError, Loader, worker_deaths_explained
from foundry.data.order import GlobalOrder


class Numbers:
    """Sample i is i; one asked for at `bad` ends its process."""

    def __init__(self, bad, end):
        self.bad, self.end = bad, end

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.bad:
            self.end()
        return {"value": torch.tensor(index)}


def loader(end):
    return Loader(
        dataset=Numbers(0, end),
        order=GlobalOrder(seed=0, fingerprint="numbers", num_samples=64),
        batch_size_at=lambda samples: 4,
        per_gpu_batch_size=4,
        num_workers=1,  # of two, the second may die in the next epoch, when torch tells whoever runs by then
    )


def read(source):
    for _ in range(16):
        source.next_window()


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL: out of memory?"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "was killed by SIGBUS: shared memory is full"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV: data.num_workers=0"),
        (lambda: os._exit(3), "ended with exit code 3: data.num_workers=0"),
    ],
)
def test_a_worker_that_dies_is_named_with_its_cause(end, message):
    # In a process of its own: torch's handler of SIGCHLD raises wherever a process is by then, as in pytest's reports.
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    process = context.Process(target=_read_and_tell, args=(end, errors))
    process.start()
    text = errors.get()
    process.join()
    assert re.match(r"DataWorkerError: a data loader worker \(process \d+\) ", text)
    assert message in text
    assert "\n" not in text


def _read_and_tell(end, errors):
    try:
        with worker_deaths_explained():
            read(loader(end))
    except BaseException as error:
        errors.put(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_whose_connections_break_before_it_has_ended(number, seconds):
    def end():
        os.closerange(3, 4096)  # as the kernel does for a process with much memory to give back
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    source = loader(end)
    with pytest.raises(DataWorkerError, match=f"was killed by {number.name}"), worker_deaths_explained():
        read(source)


def test_an_error_of_the_dataset_speaks_for_itself():
    def end():
        raise OSError("Connection reset by peer")

    source = loader(end)
    with pytest.raises(OSError, match="Connection reset by peer"):
        read(source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Killed. ", "(process 12) was killed by SIGKILL"),
        (
            "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible",
            "(process 12) was killed by SIGBUS",
        ),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly", "(process 12) has died"),
        ("DataLoader worker (pid 12) exited unexpectedly with exit code 1. Details", "ended with exit code 1"),
    ],
)
def test_torch_says_so_in_the_middle_of_other_work(text, message):
    with pytest.raises(DataWorkerError) as caught, worker_deaths_explained():
        raise RuntimeError(text)
    assert message in str(caught.value)
