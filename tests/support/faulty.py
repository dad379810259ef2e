"""An objective with a fault: environment variable FAULT is the name of the fault, FAULTY_RANK the rank that has it.

FAULTY_RANK=every is every rank.

The fault occurs in the third step, or with FAULTY_PHASE=evaluation in the first evaluation, or with FAULTY_PHASE=save
when a checkpoint writes its files.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

from foundry.checkpoint.writer import CheckpointWriter
from foundry.objectives.next_token import NextToken


def hang():
    time.sleep(600)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_once():
    if not Path("killed").exists():
        Path("killed").touch()
        kill()


def kill_agent_once():
    """Kill the agent of torchrun that started this process, and this process."""
    if not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        kill()


def nothing():
    pass


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def fail():
    raise ValueError("first line\nunknown token: 99")


def leave():
    sys.exit(0)


def ask_for_memory():
    torch.empty(2**50)


def kill_a_data_worker():
    multiprocessing.active_children()[0].kill()
    time.sleep(1)


def cause():
    globals()[os.environ["FAULT"]]()


class Objective(NextToken):
    _calls = 0

    def __init__(self, **settings):
        super().__init__(**settings)
        is_faulty = os.environ["FAULTY_RANK"] in ("every", os.environ.get("RANK", "0"))
        self._phase = os.environ.get("FAULTY_PHASE", "step") if is_faulty else None
        if self._phase == "save":
            CheckpointWriter._write_files = lambda writer, checkpoint: cause()

    def loss(self, model, microbatch):
        self._calls += model.training
        is_third = model.training and self._calls == 3
        if (self._phase == "step" and is_third) or (self._phase == "evaluation" and not model.training):
            cause()
        return super().loss(model, microbatch)
