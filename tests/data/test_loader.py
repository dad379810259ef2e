"""Data loader workers that receive signals, hang or die."""

import contextlib
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foundry.core.stop_signals import STOP_SIGNALS
from foundry.data.dataset import Dataset
from foundry.data.loader import DataWorkerError, Loader, explain_worker_deaths
from foundry.data.order import GlobalOrder


class Numbers(Dataset):
    """A dataset whose sample i is i; reading index `bad` calls `end`."""

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
        num_workers=1,  # A second worker may die in the next epoch, outside the test.
    )


def read(source):
    for _ in range(16):
        source.next_window()


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL: out of memory?"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "was killed by SIGBUS: shared memory is full"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV: set data.num_workers=0"),
        (lambda: os._exit(3), "ended with exit code 3: set data.num_workers=0"),
    ],
)
def test_dead_worker_is_reported_with_its_cause(end, message):
    text = ends_with(lambda: read(loader(end)))
    assert re.match(r"DataWorkerError: a data loader worker \(process \d+\) ", text)
    assert message in text
    assert "\n" not in text


def ends_with(function):
    """Run a function in a forked process; return its result, or its exception as text.

    The SIGCHLD handler of torch raises at any point of the process, for example while pytest writes a report.
    """
    context = multiprocessing.get_context("fork")
    ends = context.SimpleQueue()
    process = context.Process(target=_call_and_tell, args=(function, ends))
    process.start()
    end = ends.get()
    process.join()
    return end


def _call_and_tell(function, ends):
    try:
        with explain_worker_deaths():
            ends.put(function())
    except BaseException as error:
        ends.put(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
@pytest.mark.parametrize("first", [True, False], ids=["as it starts", "as it reads"])
def test_stop_signal_to_workers_loses_no_samples(signum, first, monkeypatch):
    begin = multiprocessing.process.BaseProcess.start

    def start_and_signal(self):
        begin(self)
        os.kill(self.pid, signum)

    def values():
        signal.signal(signum, lambda *_: None)  # The trainer has a handler, too, which forked workers inherit.
        if first:
            monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_and_signal)
        source = loader(lambda: None)
        read = []
        for _ in range(16):
            read += source.next_window().microbatches[0]["value"].tolist()
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signum)
        return read

    assert sorted(ends_with(values)) == list(range(64))


def test_hanging_worker_is_killed_on_reset(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)

    def leave():
        hanging = multiprocessing.Event()
        source = loader(lambda: [hanging.set(), time.sleep(600)])
        source._reader.dataset.bad = int(source._reader.order.indices(range(1))[0])
        source._prefetcher = source._start_prefetching()
        hanging.wait()
        (worker,) = multiprocessing.active_children()
        source.load_state_dict({"samples": 0, "skipped": 0})
        worker.join(60)
        return worker.exitcode

    assert ends_with(leave) == -signal.SIGKILL


def test_child_process_of_a_worker_ends_on_sigterm():
    def run_program():
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        program.terminate()
        assert program.wait() == -signal.SIGTERM

    assert ends_with(lambda: read(loader(run_program))) is None


@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_worker_that_closes_its_connections_before_dying_is_reported(number, seconds):
    def end():
        # The kernel does the same for a process with much memory to free.
        for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            with contextlib.suppress(OSError):  # The descriptor of the listing is closed.
                if file > 2 and not stat.S_ISREG(os.fstat(file).st_mode):  # torch aborts without its tensor files.
                    os.close(file)
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    source = loader(end)
    with pytest.raises(DataWorkerError, match=f"was killed by {number.name}"), explain_worker_deaths():
        read(source)


def test_dataset_exception_is_not_taken_for_a_worker_death():
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
def test_torch_worker_death_message_becomes_data_worker_error(text, message):
    with pytest.raises(DataWorkerError) as caught, explain_worker_deaths():
        raise RuntimeError(text)
    assert message in str(caught.value)
