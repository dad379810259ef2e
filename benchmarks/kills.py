"""Kill a run repeatedly, and check that it ends bitwise equal to an uninterrupted run.

A run is started with the usual command, killed with all its processes by SIGKILL, and started again with the same
arguments until it is done. Then the next run starts from scratch, until there were enough kills. A third of the kills
come at a random moment of the process's life, startup included; a third at a random moment of training; and a third
during a save, while there is a folder of a checkpoint that is being written or deleted. Starts differ in asynchronous
saves and in the number of kept checkpoints (one or two). After each kill every published checkpoint is verified. At the
end the test compares the checksums of all tensors (weights, average, optimizer) and RNG states, the trainer's state and
every recorded number of every step with an uninterrupted run.

    python benchmarks/kills.py --case fsdp [--kills 50] [--seed 0]
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundry.checkpoint.folder import problems, read_manifest
from foundry.run_dir.checkpoints import find, list_checkpoints, parse_step
from foundry.run_dir.names import METRICS
from foundry.tracking.metrics_file import read_metrics

COMMON = [
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "tracking.progress=false",
    "evaluation.interval=0.125 run",
    "evaluation.max_samples=8",
    "evaluation.write_samples=false",
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=2",
    "precision=fp32",
]
SMALL = [
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=2",
]
TEXT = [*SMALL, "data=text", "data.path=text.txt", "data.seq_len=16", "data.vocab_size=300"]
CHATS = [*SMALL, "data=arithmetic", "data.num_rows=400", "objective=sft"]
PAIRS = [*SMALL, "data=arithmetic", "data.form=preferences", "data.num_rows=400", "objective=dpo"]
DIGITS = ["hparams=diffusion", "model.hidden_size=16", "model.num_layers=1", "model.num_heads=2"]
CASES = {
    "lm": [*TEXT, "hparams.max_steps=600"],
    "fsdp": [*TEXT, "hparams.max_steps=200", "distributed=fsdp", "distributed.nproc_per_node=2"],
    "sft": [*CHATS, "hparams.max_steps=400", "objective.hidden_dropout=0.1", "objective.attention_dropout=0.1"],
    "lora": [*TEXT, "hparams.max_steps=400", "peft=lora", "optimizer=adamw", "peft.adapter_dropout=0.1"],
    "dpo": [*PAIRS, "hparams.max_steps=300"],
    "diffusion": [*DIGITS, "hparams.max_steps=600", "hparams.ema_decay=0.99"],
}
INTERVAL = {"lm": 20, "fsdp": 5, "sft": 20, "lora": 20, "dpo": 20, "diffusion": 20}
MOMENTS = ("any", "training", "save")
UNFINISHED = (".partial", ".removed")
TIMINGS = {"step_seconds", "samples_per_second", "tokens_per_second", "tflops", "mfu", "peak_memory_bytes"}
MARK = "FOUNDRY_KILLS"


@dataclass
class Count:
    """Counters of kills and starts."""

    kills: int = 0
    inside_a_save: int = 0
    starts: int = 0
    runs: int = 0


class Life:
    """One start of the command, until it ends or is killed; a mark in the environment identifies its processes."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: self.mark, "FOUNDRY_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.output = (folder / "said.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "foundry", *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def tree(self) -> list[int]:
        """Return the ids of all processes of this start, including detached ones."""
        marked, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and marked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def kill(self, pids: Sequence[int] = ()) -> bool:
        """Kill all processes at once, `pids` first; return True if the command was still running."""
        alive = self.process.poll() is None
        targets = list(pids)
        while targets := targets or self.tree():
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            targets = []
        self.process.wait()
        return alive

    def ended(self) -> bool:
        """Return True if the command has ended with success, False if it still runs; raise an error if it failed."""
        if self.process.poll() is None:
            return False
        self.output.seek(0)
        assert self.process.returncode == 0, self.output.read()
        return True


def unfinished(checkpoints: Path) -> list[str]:
    """Return the names of checkpoint folders that are being written or deleted."""
    try:
        names = [path.name for path in checkpoints.iterdir()]
    except FileNotFoundError:
        return []
    return [name for name in names if name.startswith(".step_") and name.endswith(UNFINISHED)]


def wait_and_kill(life: Life, run_dir: Path, moment: str, rng: random.Random, seconds: tuple[float, float]) -> bool:
    """Kill the run at a random moment of the kind `moment`, unless it ends before; return True if it was killed.

    Args:
        seconds: duration of an uninterrupted run, and of its training alone.
    """
    total, training = seconds
    if moment == "any":
        end = time.monotonic() + rng.uniform(0, total)
        while not life.ended() and time.monotonic() < end:
            time.sleep(0.005)
        return life.kill()
    metrics = run_dir / METRICS
    size = metrics.stat().st_size if metrics.is_file() else 0
    while not (metrics.is_file() and metrics.stat().st_size > size):
        if life.ended():
            return False
        # A restart truncates the records of steps that it repeats.
        size = min(size, metrics.stat().st_size) if metrics.is_file() else 0
        time.sleep(0.005)
    pids, end = life.tree(), time.monotonic() + rng.uniform(0, training / 2)
    while time.monotonic() < end and not life.ended():
        time.sleep(0.005)
    while moment == "save" and not life.ended() and not unfinished(run_dir / "checkpoints"):
        time.sleep(0.0002)
    return life.kill(pids)


def check_checkpoints(run_dir: Path, newest_before: int) -> int:
    """Check that all checkpoints are intact and the newest is at step `newest_before` or later; return its step."""
    folders = list_checkpoints(run_dir)
    for folder in folders:
        assert problems(folder) == [], f"{folder}: {problems(folder)}"
    assert not list((run_dir / "checkpoints").glob("*.corrupt"))
    newest = parse_step(folders[0]) if folders else -1
    assert newest >= newest_before, f"the newest checkpoint was of step {newest_before}, now of {newest}"
    if folders:
        assert find(run_dir, "last").is_dir()
    return newest


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return the values of a run that kills must not change: recorded numbers, checksums, trainer state and step."""
    records = [{k: v for k, v in record.items() if k not in TIMINGS} for record in read_metrics(run_dir)]
    final = read_manifest(find(run_dir, "last"))
    return {"records": records, "files": dict(final.files), "state": final.state, "step": final.step}


def words_of(case: str, run_dir: Path, *, asynchronous: bool = True, keep_last: int = 2) -> list[str]:
    """Return the arguments of the command; how checkpoints are written and kept may change between starts."""
    return [
        *CASES[case],
        *COMMON,
        f"checkpoint.interval={INTERVAL[case]}",
        f"checkpoint.asynchronous={str(asynchronous).lower()}",
        f"checkpoint.keep_last={keep_last}",
        f"hydra.run.dir={run_dir.name}",
    ]


def undisturbed(
    case: str, folder: Path, start: Callable[[Path, list[str]], Life] = Life
) -> tuple[dict[str, Any], tuple[float, float]]:
    """Run the case without kills; return its outcome and the seconds of the whole run and of training alone.

    Args:
        case: key of `CASES`.
        folder: working directory of the run.
        start: starts the command with arguments in a folder.
    """
    seconds = 0.0, 0.0
    for name in ("warm", "reference"):  # only the run `warm` has to make the tokenizer
        run_dir, begin = folder / name, time.monotonic()
        life, first = start(folder, words_of(case, run_dir)), None
        while not life.ended():
            if first is None and (run_dir / METRICS).is_file() and (run_dir / METRICS).stat().st_size:
                first = time.monotonic()
            time.sleep(0.005)
        end = time.monotonic()
        seconds = end - begin, end - (first or end)
    reference = outcome(folder / "reference")
    assert outcome(folder / "warm") == reference, "two undisturbed runs differ"
    return reference, seconds


def disturbed(
    case: str,
    folder: Path,
    number: int,
    limit: int,
    rng: random.Random,
    seconds: tuple[float, float],
    count: Count,
    moments: Sequence[str],
    start: Callable[[Path, list[str]], Life] = Life,
) -> Path:
    """Start, kill and restart a run until it is done or there were `limit` kills; return its run directory.

    Args:
        moments: kinds of moments for the kills, used in turn.
        start: starts the command with arguments in a folder.
    """
    run_dir, newest = folder / f"killed-{number}", -1
    while True:
        asynchronous, keep_last = rng.random() < 0.5, rng.choice((1, 2))
        life = start(folder, words_of(case, run_dir, asynchronous=asynchronous, keep_last=keep_last))
        count.starts += 1
        try:
            if count.kills >= limit:
                while not life.ended():
                    time.sleep(0.01)
                killed = False
            else:
                killed = wait_and_kill(life, run_dir, moments[count.kills % len(moments)], rng, seconds)
        finally:
            life.kill()
            life.output.close()
        count.kills += killed
        count.inside_a_save += killed and bool(unfinished(run_dir / "checkpoints"))
        newest = check_checkpoints(run_dir, newest)
        if not killed:
            return run_dir


def kill_runs(
    case: str,
    folder: Path,
    kills: int,
    moments: Sequence[str],
    rng: random.Random,
    start: Callable[[Path, list[str]], Life] = Life,
) -> Count:
    """Kill runs of a case in an empty folder, and compare each run that is done with an undisturbed one.

    Args:
        case: key of `CASES`.
        folder: working directory of the runs.
        kills: number of kills.
        moments: kinds of moments for the kills, used in turn.
        rng: decides on moments and on the settings of each start.
        start: starts the command with arguments in a folder.
    """
    count = Count()
    (folder / "text.txt").write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(4000)))
    reference, seconds = undisturbed(case, folder, start)
    while count.kills < kills:
        run_dir = disturbed(case, folder, count.runs, kills, rng, seconds, count, moments, start)
        count.runs += 1
        result = outcome(run_dir)
        for name, expected in reference.items():
            assert result[name] == expected, f"{run_dir.name}: {name} differ from the undisturbed run's"
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS, help="of the kills, in turn")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        rng = random.Random(options.seed)
        count = kill_runs(options.case, Path(temporary), options.kills, options.moments, rng)
    restarts = count.starts - count.runs
    print(
        f"{options.case}: {count.kills} kills, {count.inside_a_save} of them inside a save; {count.runs} runs, "
        f"{restarts} restarts, {time.monotonic() - begin:.0f} s; all bit-identical to an undisturbed run"
    )


if __name__ == "__main__":
    main()
