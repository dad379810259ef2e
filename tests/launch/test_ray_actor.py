"""The actor of a Ray rank, called in this process."""

import json
import os
import signal
import threading
import time

import pytest

from foundry.launch.ray.actor import RankActor

SHOW = """
import json, os, sys
print(json.dumps({**os.environ, "cwd": os.getcwd(), "path": sys.path}))
"""
SLEEP = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "show_environment.py").write_text(SHOW)
    (tmp_path / "modules" / "sleep_long.py").write_text(SLEEP)
    (tmp_path / "here").mkdir()

    def run(actor, module, **variables):
        variables = {"PYTHONPATH": str(tmp_path / "modules"), **variables}
        return actor.run(module, str(tmp_path), "output.rank1.log", str(tmp_path / "here"), variables)

    return run


def test_rank_has_the_actors_environment_without_variables_of_other_launchers(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("SLURM_PROCID", "5")  # Ray itself may have been started by Slurm
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    assert run(RankActor(), "show_environment", WORLD_SIZE="2", OMP_NUM_THREADS="3") == 0
    shown = json.loads((tmp_path / "output.rank1.log").read_text())
    assert {name: shown[name] for name in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "OMP_NUM_THREADS")} == {
        "CUDA_VISIBLE_DEVICES": "3",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "3",
    }
    assert not {"SLURM_PROCID", "RANK"} & set(shown)
    assert shown["cwd"] == str(tmp_path / "here")
    assert shown["PYTHONPATH"] == f"{tmp_path / 'modules'}{os.pathsep}{tmp_path / 'own'}"
    assert shown["cwd"] not in shown["path"]  # the folder may belong to somebody else


@pytest.mark.parametrize(("kill", "code"), [(False, 128 + signal.SIGTERM), (True, -signal.SIGKILL)])
def test_rank_ends_when_the_actor_stops_or_kills_it(run, tmp_path, kill, code):
    actor, ends = RankActor(), []
    thread = threading.Thread(target=lambda: ends.append(run(actor, "sleep_long")))
    thread.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    actor.stop(kill=kill)
    thread.join(60)
    assert ends == [code]
    actor.stop(kill=kill)  # does nothing, as the rank has ended


@pytest.mark.parametrize("kill", [False, True])
def test_rank_that_is_stopped_before_its_start_does_not_start(run, tmp_path, kill):
    """Ray runs the calls of an actor at the same time, so that `stop` may come first."""
    actor = RankActor()
    actor.stop(kill=kill)
    assert run(actor, "show_environment") == 128 + signal.SIGTERM
    assert not (tmp_path / "output.rank1.log").exists()


def test_second_call_waits_for_the_same_rank(run, tmp_path):
    actor = RankActor()
    assert [run(actor, "show_environment"), run(actor, "show_environment")] == [0, 0]
    assert (tmp_path / "output.rank1.log").read_text().count('"PATH"') == 1
