"""What stops a run is not for the process of its environment, and still is for what the environment starts."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from foundry.environments.protocol import Answer
from foundry.environments.worker import Worker


class Slow:
    """Takes half a second for an answer."""

    def score(self, answers):
        time.sleep(0.5)
        return [{"done": 1.0}]


class Ending:
    """Ends by a signal what it has started, a program and a fork; scores how they ended."""

    def score(self, answers):
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        program.terminate()
        os.kill(child, signal.SIGTERM)
        return [{"program": program.wait(), "fork": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}]


def started(kind):
    return Worker({"_target_": f"{__name__}.{kind.__name__}"}, timeout_seconds=30)


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        *(
            pytest.param(number, marks=pytest.mark.long)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        ),
    ],
)
def test_a_signal_that_stops_a_run_costs_no_answer_its_reward(signum):
    worker = started(Slow)
    process = worker._process
    sending = threading.Timer(0.2, process.send_signal, [signum])
    sending.start()
    assert worker.score([Answer("a")]) == [{"done": 1.0}]
    sending.join()
    process.send_signal(signum)  # between two answers
    assert worker.score([Answer("b")]) == [{"done": 1.0}]
    assert worker._process is process
    worker.close()
    assert process.returncode == -signal.SIGKILL


def test_one_that_comes_while_it_starts_is_survived_too(monkeypatch):
    ask = Worker._ask

    def signalled(self, request, *args):
        self._process.send_signal(signal.SIGTERM)
        return ask(self, request, *args)

    monkeypatch.setattr(Worker, "_ask", signalled)
    worker = started(Slow)
    assert worker.score([Answer("a")]) == [{"done": 1.0}]
    worker.close()


def test_what_an_environment_starts_ends_by_signals():
    worker = started(Ending)
    assert worker.score([Answer("a")]) == [{"program": -signal.SIGTERM, "fork": -signal.SIGTERM}]
    worker.close()
