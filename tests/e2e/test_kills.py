"""Runs that are killed at a few moments resume bit for bit; `benchmarks/kills.py` kills and compares."""

import os
import random
from contextlib import suppress
from pathlib import Path

import pytest
from support.warm import WarmShell

pytestmark = pytest.mark.long


@pytest.fixture
def kills(monkeypatch):
    """The benchmark, with shorter runs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import kills

    for case, words in kills.CASES.items():
        monkeypatch.setitem(kills.CASES, case, [*words, "hparams.max_steps=160"])
    return kills


@pytest.fixture
def start(kills, tmp_path, cache):
    """A function that starts the command in a fork, so that most moments are in training."""
    shell = WarmShell(tmp_path, cache)

    class ForkedLife(kills.Life):
        def __init__(self, folder, words):
            self.output = (folder / "said.txt").open("w+")
            self.process = shell.start(*words)

        def tree(self):
            """Return the ids of all processes in the working directory of the run."""
            found = []
            for entry in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if (entry / "cwd").readlink() == tmp_path and (pid := int(entry.name)) != os.getpid():
                        found.append(pid)
            return found

        def ended(self):
            if self.process.poll() is None:
                return False
            assert self.process.returncode == 0, self.process.outputs()
            return True

    return ForkedLife


# Few moments per objective: safety at any moment does not depend on the objective.
@pytest.mark.parametrize(
    ("case", "moments"),
    [("lm", ("any", "training", "save")), ("sft", ("save",)), ("lora", ("training",)), ("dpo", ("save",))],
)
def test_killed_run_resumes_bit_identical_to_an_uninterrupted_run(kills, start, tmp_path, case, moments):
    count = kills.kill_runs(case, tmp_path, len(moments), moments, random.Random(0), start)
    assert count.kills == len(moments)
