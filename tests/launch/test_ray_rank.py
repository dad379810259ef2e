"""The process between a Ray actor and a rank: the rank saves and stops however the actor ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

RANK = """
import os, pathlib, signal, sys, time
run_dir = pathlib.Path(sys.argv[1])
assert sys.argv[2] == "trust=true"

def save(signum, frame):
    (run_dir / "saved").write_text(signal.Signals(signum).name)
    os._exit(128 + signum)

signal.signal(signal.SIGTERM, save)
(run_dir / "ready").touch()
if code := os.environ.get("CODE"):
    os.kill(os.getpid(), signal.SIGKILL) if code == "killed" else sys.exit(int(code))
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "some_rank.py").write_text(RANK)
    started = []

    def start(**variables):
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", "foundry.launch.ray.rank", "some_rank", str(tmp_path)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **variables},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.stdin.close()
        process.kill()
        process.wait()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path


def test_signal_is_forwarded_and_the_exit_code_returned(start, tmp_path):
    process = start()
    wait_for(tmp_path / "ready")
    process.terminate()
    assert process.wait(30) == 143
    assert (tmp_path / "saved").read_text() == "SIGTERM"


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("2", 2), ("killed", 137)])
def test_exit_code_is_the_ranks(start, code, expected):
    assert start(CODE=code).wait(30) == expected


def test_rank_saves_if_the_actor_dies(start, tmp_path):
    process = start()
    wait_for(tmp_path / "ready")
    process.stdin.close()
    assert process.wait(30) == 143
    assert (tmp_path / "saved").read_text() == "SIGTERM"


def test_rank_saves_if_ray_kills_the_children_of_the_actor(start, tmp_path):
    process = start()
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGKILL)
    assert wait_for(tmp_path / "saved").read_text() == "SIGTERM"
