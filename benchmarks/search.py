"""Idle places of a search with and without batches, and recovery of a search whose processes are killed.

    python benchmarks/search.py idle [--jobs 40] [--longest 20]

runs the same jobs in two places of `hydra/launcher=local`, without and with batches. Each job is a run of one step that
sleeps for a random time, 1 to 20 s. A place is idle while it has no process, from the start of the first job to the end
of the last one; the table has the share of idle seconds in the seconds of both places.

    python benchmarks/search.py kills [--jobs 40] [--longest 4] [--kills 20]

sends SIGKILL at random moments, half of them to the command, which is then started again, and half to a job, which
fails. At the end, each trial must have one outcome, the outcome of its run.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import optuna
from records import Column, Row, Values, finish, parser

from foundry.run_dir.status import read_status
from foundry.run_dir.study_storage import open_storage

SLEEPER = '''
import time


class Sleeper:
    """Evaluator that sleeps."""

    def __init__(self, *, seconds):
        self.seconds = seconds

    def evaluate(self, model, context):
        with open("starts.txt", "a") as file:
            file.write(f"{self.seconds}\\n")
        time.sleep(self.seconds)
        return {"slept": self.seconds}
'''
PLACES = 2
RUN = [
    *["hparams=diffusion", "debug=fast", "tracking=none", "model.hidden_size=16", "model.num_layers=1"],
    *["model.num_heads=2", "hparams.global_batch_size=4", "hparams.per_gpu_batch_size=4", "hparams.max_steps=1"],
    *["~evaluation.evaluators.held_out", "evaluation.write_samples=false", "evaluation.metric=val_slept"],
    *[
        "hydra/launcher=local",
        f"hydra.launcher.n_jobs={PLACES}",
        "hydra/sweeper=optuna",
        "hydra/sweeper/sampler=random",
    ],
    *[f"hydra.sweeper.n_jobs={PLACES}", "hydra.sweeper.pruner=null", "hydra.sweeper.max_failures=null"],
]
COLUMNS = [
    Column(key="idle", heading="idle, % of the places' time", format=".1f"),
    Column(key="seconds", heading="first start to last end, s", format=",.0f"),
]

KILL_COLUMNS = [
    Column(key="command", heading="SIGKILL to the command"),
    Column(key="job", heading="SIGKILL to a job"),
    Column(key="complete", heading="complete trials"),
    Column(key="failed", heading="trials failed as killed"),
    Column(key="again", heading="interrupted jobs that ran again"),
    Column(key="seconds", heading="s"),
]


def start(folder: Path, *words: str, longest: float, jobs: int) -> "subprocess.Popen[bytes]":
    """Start a search in a folder, with its output in a file there."""
    (folder / "sleeper.py").write_text(SLEEPER)
    sleeper = "+evaluation.evaluators.sleeper={_target_: sleeper.Sleeper, seconds: 1, metrics: [slept]}"
    key = f"evaluation.evaluators.sleeper.seconds=interval(1,{longest})"
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(folder), "FOUNDRY_CACHE": str(folder / "c")}
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "foundry", "-m", *RUN, sleeper, key, f"hydra.sweeper.n_trials={jobs}", *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def children(pid: int) -> list[int]:
    """Return the child processes of a process, without those that have exited."""
    with suppress(OSError):
        pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [pid for pid in pids if _is_alive(pid)]
    return []


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def processes(command: int) -> list[int]:
    """Return the processes of the jobs of a search; they are forked by a child of its command, the fork server."""
    return [pid for child in children(command) for pid in children(child) if os.getsid(pid) == pid]


def measure(folder: Path, wait: str, *, longest: float, jobs: int) -> tuple[float, float]:
    """Run a search; return its share of idle time, and the seconds from the first start to the last end."""
    search = start(folder, f"hydra.sweeper.wait={wait}", f"hydra.sweep.dir={wait}", longest=longest, jobs=jobs)
    begin = end = last = busy = 0.0
    while search.poll() is None:
        with suppress(ProcessLookupError):
            count, now = len(processes(search.pid)), time.monotonic()
            if begin:
                busy += count * (now - last)
            if count:
                begin, end = begin or now, now
            last = now
        time.sleep(0.01)
    assert search.returncode == 0, (folder / "output.txt").read_text()
    return 1 - busy / (PLACES * (end - begin)), end - begin


def idle(options: argparse.Namespace, jobs: int, longest: float) -> None:
    """Write a table of the idle time without and with batches."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="search-") as temporary:
        for wait in ("none", "batch"):
            share, seconds = measure(Path(temporary), wait, longest=longest, jobs=jobs)
            rows.append(Row(side=f"`wait={wait}`", values={"idle": [100 * share], "seconds": [seconds]}))
    note = f"{jobs} jobs that sleep for 1 to {longest:g} s, the same on both sides, in {PLACES} places."
    finish(options, name="search_idle", side="setting", columns=COLUMNS, rows=rows, notes=[note])


def kills(options: argparse.Namespace, jobs: int, number: int, longest: float) -> None:
    """Kill the command and the jobs of a search, check that each trial has one outcome, and write a table."""
    rng, begin, killed = random.Random(0), time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="search-") as temporary:
        folder = Path(temporary)
        search = start(folder, "hydra.sweep.dir=s", longest=longest, jobs=jobs)
        while sum(killed.values()) < number and search.poll() is None:
            while not (pids := _living(search)) and search.poll() is None:
                time.sleep(0.02)
            time.sleep(rng.uniform(0, longest))
            is_command = sum(killed.values()) % 2 == 0
            with suppress(ProcessLookupError, IndexError):
                pids = _living(search)
                os.kill(search.pid if is_command else rng.choice(pids), signal.SIGKILL)
                killed["command" if is_command else "job"] += 1
            if is_command:
                search.wait()
                search = start(folder, "hydra.sweep.dir=s", longest=longest, jobs=jobs)
        search.wait()
        trials = optuna.load_study(study_name="search", storage=open_storage(folder / "s" / "optuna.jsonl")).trials
        ends = Counter(trial.state.name for trial in trials)
        states = Counter(read_status(file.parent)["state"] for file in (folder / "s").glob("*/status.json"))
        assert [trial.number for trial in trials] == list(range(jobs)), ends
        # A job that is killed after its last record is complete. If its command is killed too, it runs again.
        assert ends.keys() <= {"COMPLETE", "FAIL"}, ends
        assert ends["FAIL"] <= killed["job"], (ends, killed)
        assert states == Counter(finished=ends["COMPLETE"], failed=ends["FAIL"]), (states, ends)
        starts = Counter((folder / "starts.txt").read_text().split())
        again = starts.total() - len(starts)
        assert again <= PLACES * killed["command"], (again, killed)
    values: dict[str, Values] = {
        "command": [killed["command"]],
        "job": [killed["job"]],
        "complete": [ends["COMPLETE"]],
        "failed": [ends["FAIL"]],
        "again": [again],
        "seconds": [time.monotonic() - begin],
    }
    note = "No trial is lost, has two outcomes, or has an outcome other than that of its run."
    row = Row(side=f"{jobs} jobs", values=values)
    finish(options, name="search_kills", side="search", columns=KILL_COLUMNS, rows=[row], notes=[note])


def _living(search: "subprocess.Popen[bytes]") -> list[int]:
    with suppress(ProcessLookupError):
        return processes(search.pid)
    return []


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("what", choices=("idle", "kills"))
    cli.add_argument("--jobs", type=int, default=40)
    cli.add_argument("--longest", type=float)
    cli.add_argument("--kills", type=int, default=20)
    options = cli.parse_args()
    if options.smoke:
        options.jobs, options.longest, options.kills = 4, 2, 2
    if options.what == "idle":
        idle(options, options.jobs, options.longest or 20)
    else:
        kills(options, options.jobs, options.kills, options.longest or 4)


if __name__ == "__main__":
    main()
