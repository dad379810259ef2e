"""Cost of a job in a sweep compared with a single run, and recovery of a sweep whose process is killed.

    python benchmarks/sweeps.py cost [--jobs 11] [--rounds 5]

times runs of one step: alone, one after the other, and as jobs of one sweep with each launcher; with Slurm's if
SLURM_CONF is set. The launchers take turns, and the output has medians over the rounds. "A job" is the time of the
whole sweep divided by its jobs; "each further" excludes the time of a sweep with a single job.

    python benchmarks/sweeps.py kills [--jobs 100] [--kills 3]

kills the process of a sweep with SIGKILL while two jobs run at a time, once a certain share of them has finished, waits
for its jobs to end, and starts the same command again, which must run the unfinished jobs only. At the end, checksums
of tensors and RNG states, trainer state and recorded numbers of every job are compared with an uninterrupted sweep.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kills import outcome
from records import Column, Row, finish, parser

from foundry.run_dir.lock import is_held
from foundry.run_dir.status import read_status

RUN = [
    "hparams=diffusion",
    "debug=fast",
    "tracking=none",
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=4",
    "evaluation.interval=null",
    "evaluation.write_samples=false",
]
ALONE = "`python -m foundry`"
LOCAL = ["hydra/launcher=local", "hydra.launcher.n_jobs=2"]
LAUNCHERS: dict[str, list[str]] = {
    "`sequential`": [],
    "`local`, one at a time": ["hydra/launcher=local", "hydra.launcher.n_jobs=1"],
    "`local`, two at a time": LOCAL,
    "`slurm`": ["hydra/launcher=slurm", "hydra.launcher.timeout_min=5", "hydra.launcher.signal_delay_s=30"],
}
RUNS_ALONE = 3
COLUMNS = [
    Column(key="job", heading="a job, s", format=".2f", spread=True),
    Column(key="of_job", heading="of alone", format=".2f"),
    Column(key="further", heading="each further, s", format=".2f", spread=True),
    Column(key="of_further", heading="of alone", format=".2f"),
]


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start `python -m foundry` in a folder, with its output in a file there."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "FOUNDRY_CACHE": str(folder / "cache")}
    with (folder / "said.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "foundry", *words, *RUN],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def wait(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process ends; raise an error with its output if it failed."""
    assert process.wait() == 0, (folder / "said.txt").read_text()


def seconds(folder: Path, *words: str) -> float:
    """Return the seconds that a command takes; its run directories are removed."""
    begin = time.perf_counter()
    wait(folder, start(folder, *words))
    elapsed = time.perf_counter() - begin
    shutil.rmtree(folder / "out")
    return elapsed


def seeds(number: int) -> str:
    """Return the override that makes this number of jobs."""
    return f"hparams.seed=range({number})"


def cost(options: argparse.Namespace, jobs: int, rounds: int) -> None:
    """Write a table of the seconds per job and per further job, with their ratios to a run alone, by launcher."""
    ways = {name: words for name, words in LAUNCHERS.items() if name != "`slurm`" or os.environ.get("SLURM_CONF")}
    alone = list[float]()
    sweep_seconds: dict[str, list[float]] = {name: [] for name in ways}
    single: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="sweeps-") as temporary:
        folder = Path(temporary)
        for _ in range(rounds):
            alone += [seconds(folder, "hparams.max_steps=1", "hydra.run.dir=out") for _ in range(RUNS_ALONE)]
            for name, words in ways.items():
                sweep = ["-m", "hparams.max_steps=1", *words, "hydra.sweep.dir=out"]
                single[name].append(seconds(folder, *sweep, seeds(1)))
                sweep_seconds[name].append(seconds(folder, *sweep, seeds(jobs)))
    run, rows = statistics.median(alone), [Row(side=ALONE, values={"job": alone, "further": alone})]
    for name in ways:
        job = [elapsed / jobs for elapsed in sweep_seconds[name]]
        further = [(n - first) / (jobs - 1) for n, first in zip(sweep_seconds[name], single[name], strict=True)]
        of_job, of_further = statistics.median(job) / run, statistics.median(further) / run
        rows.append(
            Row(side=name, values={"job": job, "of_job": [of_job], "further": further, "of_further": [of_further]})
        )
    finish(options, name="sweeps", side="way", columns=COLUMNS, rows=rows, notes=[f"{jobs} jobs a sweep."])


def states(sweep: Path) -> Counter[str]:
    """Return the number of jobs in each state."""
    return Counter(str(read_status(sweep / job["dir"]).get("state")) for job in entries(sweep))


def entries(sweep: Path) -> list[dict[str, Any]]:
    """Return the sweep's jobs."""
    return json.loads((sweep / "sweep.json").read_text())["jobs"] if (sweep / "sweep.json").exists() else []


def results(sweep: Path) -> dict[Path, int]:
    """Return the result files of the jobs with their modification times."""
    return {path: path.stat().st_mtime_ns for path in sweep.glob("*/result.json")}


def kill_after(process: subprocess.Popen[bytes], sweep: Path, finished: int, pause: float) -> float:
    """Kill the process after `finished` jobs have finished and a pause; return the seconds until no job runs."""
    while states(sweep)["finished"] < finished:
        assert process.poll() is None, "the sweep ended before it could be killed"
        time.sleep(0.02)
    time.sleep(pause)
    process.kill()
    process.wait()
    begin = time.monotonic()
    while any(is_held(sweep / job["dir"]) for job in entries(sweep)):
        time.sleep(0.01)
    return time.monotonic() - begin


def kills(jobs: int, number: int) -> None:
    """Kill a sweep this number of times, resume it, and compare its jobs with an uninterrupted sweep."""
    rng, begin, waits, stopped = random.Random(0), time.monotonic(), list[float](), 0
    with tempfile.TemporaryDirectory(prefix="sweeps-") as temporary:
        folder = Path(temporary)
        words = ["-m", "hparams.max_steps=150", "tracking.log_every_n_steps=1", seeds(jobs)]
        wait(folder, start(folder, *words, "hydra.sweep.dir=undisturbed"))
        job_seconds = (time.monotonic() - begin) / jobs
        sweep = folder / "killed"
        for kill in range(number + 1):
            before = results(sweep)
            process = start(folder, *words, *LOCAL, "hydra.sweep.dir=killed")
            if kill == number:
                wait(folder, process)
            else:
                finished = (kill + 1) * jobs // (number + 1)
                waits.append(kill_after(process, sweep, finished, rng.uniform(0, job_seconds)))
                assert states(sweep)["running"] == 0, states(sweep)
                stopped += states(sweep)["stopped"]
            assert before.items() <= results(sweep).items(), "a job that had finished ran again"
        assert states(sweep) == {"finished": jobs}
        for job in range(jobs):
            assert outcome(sweep / str(job)) == outcome(folder / "undisturbed" / str(job)), f"job {job} differs"
    print(
        f"{jobs} jobs, {number} kills of their sweep; within {max(waits):.1f} s its jobs had ended, {stopped} of them "
        f"with a checkpoint; {time.monotonic() - begin:.0f} s; all bit-identical to an undisturbed sweep's"
    )


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("what", choices=("cost", "kills"))
    cli.add_argument("--jobs", type=int)
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--kills", type=int, default=3)
    options = cli.parse_args()
    if options.what == "cost":
        cost(options, options.jobs or 11, options.rounds)
    else:
        kills(options.jobs or 100, options.kills)


if __name__ == "__main__":
    main()
