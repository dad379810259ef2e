"""Stop signals of a run do not affect the environment's process, but work for its children."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from foundry.generation.scoring import Answer
from foundry.tasks.post_training.environments.worker import Worker


class Slow:
    """Scores an answer in half a second."""

    def score(self, answers):
        time.sleep(0.5)
        return [{"done": 1.0}]


class Ending:
    """Sends SIGTERM to its child processes, a program and a fork; scores are their exit codes."""

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


class Forking:
    """Sends SIGTERM to a fork of this process before the fork has finished; the score is the exit code of the fork."""

    def score(self, answers):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        return [{"fork": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}]


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
def test_stop_signal_does_not_cost_an_answer_its_reward(signum):
    worker = started(Slow)
    process = worker._process
    sending = threading.Timer(0.2, process.send_signal, [signum])
    sending.start()
    assert worker.score([Answer("a")]) == [{"done": 1.0}]
    sending.join()
    process.send_signal(signum)  # Between two answers.
    assert worker.score([Answer("b")]) == [{"done": 1.0}]
    assert worker._process is process
    worker.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.long
def test_environment_process_survives_a_signal_during_its_start(monkeypatch):
    send = Worker._send

    def signalled(self, request, *args):
        self._process.send_signal(signal.SIGTERM)
        return send(self, request, *args)

    monkeypatch.setattr(Worker, "_send", signalled)
    worker = started(Slow)
    assert worker.score([Answer("a")]) == [{"done": 1.0}]
    worker.close()


@pytest.mark.long
def test_child_processes_of_an_environment_end_on_sigterm():
    worker = started(Ending)
    assert worker.score([Answer("a")]) == [{"program": -signal.SIGTERM, "fork": -signal.SIGTERM}]
    worker.close()


def test_fork_of_an_environment_ends_on_a_signal_during_the_fork():
    worker = started(Forking)
    assert worker.score([Answer("a")]) == [{"fork": -signal.SIGTERM}]
    worker.close()
