"""An objective that, in its third step, does what FAULT says on the rank that FAULTY_RANK names."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch

from foundry.objectives.next_token import NextToken


def hang():
    time.sleep(600)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_once():
    if not Path("killed").exists():
        Path("killed").touch()
        kill()


def nothing():
    pass


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def fail():
    raise ValueError("first line\nno such token: 99")


def ask_for_memory():
    torch.empty(2**50)


def kill_a_data_worker():
    multiprocessing.active_children()[0].kill()
    time.sleep(1)


class Objective(NextToken):
    _calls = 0

    def loss(self, model, microbatch):
        self._calls += 1
        if self._calls == 3 and os.environ.get("RANK", "0") == os.environ["FAULTY_RANK"]:
            globals()[os.environ["FAULT"]]()
        return super().loss(model, microbatch)
