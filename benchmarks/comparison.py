"""How the sides of a comparison run: each in a process of its own, in turn, round by round.

Times and memory are shown only once the losses of all sides are equal: a side that trains something else is no side.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
NUM_WARMUP = 3
"""Steps at the beginning of a run that are not timed."""

PEERS: dict[str, tuple[str, str | None]] = {
    "raw": ("PyTorch loop", None),
    "hf": ("HF Trainer", "accelerate"),
    "lightning": ("Lightning", "lightning"),
    "accelerate": ("accelerate", "accelerate"),
}
"""By the word that chooses it: the name of a side, and the package besides torch and transformers that it needs."""

FOUND = "found.json"
"""The file in which rank 0 hands over what was measured."""

TRAINED_ALIKE = (
    "optimizer=adamw",
    "optimizer.weight_decay=0",
    "scheduler=constant",
    "scheduler.warmup=0",
    "hparams.grad_clip_norm=1.0",
)
"""Overrides that give foundry the updates of a plain loop: AdamW at a constant rate, clipped."""

QUIET = (
    "tracking=none",
    "tracking.progress=false",
    "tracking.log_every_n_steps=1",
    "evaluation.interval=null",
    "evaluation.max_samples=1",
    "evaluation.write_samples=false",
    "checkpoint=none",
)
"""Overrides that leave training alone, with the loss of each step."""

Measured = dict[str, Any]
"""What one side wrote down in one round; see `meter.Meter.write`."""


def call(*arguments: str | Path, threads: int = 1) -> str:
    """Run a script or module of Python's and give what it prints.

    Args:
        arguments: after `python`.
        threads: of torch.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(found.stdout + found.stderr)[-3000:]}")
    return found.stdout


def default_threads() -> int:
    """OMP_NUM_THREADS, or as many as there are cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def run_job(script: str, *words: str, job: Mapping[str, Any], threads: int) -> Measured:
    """Run a script of this folder on a job, in the job's own folder, and give what it measured.

    Args:
        script: its name; it is called with `words` and the job's file.
        words: before the file.
        job: as JSON; `measured` is the file that the script writes.
        threads: of torch.
    """
    file = Path(job["measured"]).with_name("job.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(job))
    call(HERE / script, *words, file, threads=threads)
    measured: Measured = json.loads(Path(job["measured"]).read_text())
    return measured


def run_ranks(function: Callable[..., None], options: argparse.Namespace, ranks: int) -> Any:
    """Call `function(rank, options, folder)` in a process for each rank; what rank 0 has written to `FOUND` there.

    Args:
        function: at the top of a module; it calls `join_ranks` first.
        options: handed on.
        ranks: how many.
    """
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(function, (options, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        return json.loads(Path(folder, FOUND).read_text())


def join_ranks(rank: int, ranks: int, folder: str, backend: str = "gloo") -> None:
    """The process group of those that `run_ranks` has started; each computes on one thread."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def installed(sides: Iterable[str]) -> list[str]:
    """The sides whose packages are there; says which are left out, and what would bring them."""
    found = list[str]()
    for side in sides:
        package = PEERS[side][1] if side in PEERS else None
        if package is not None and find_spec(package) is None:
            print(f"{PEERS[side][0]} is left out: {package} is not installed (pip install -e '.[bench]')")
        else:
            found.append(side)
    return found


def in_turn(sides: Sequence[str], rounds: int, measure: Callable[[str, int], Measured]) -> dict[str, list[Measured]]:
    """What each side measured, a list entry a round; every round starts with another side.

    Args:
        sides: in the order of the table.
        rounds: at least one.
        measure: given a side and the number of the round.
    """
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for number in range(rounds):
        turn = number % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            found[side].append(measure(side, number))
    return found


def losses_apart(found: Mapping[str, Sequence[Measured]], *, most: float = 0.01) -> dict[str, float]:
    """By how much each side's losses differ from the first side's at most, relatively, in any step.

    Args:
        found: from `in_turn`, with `losses` of each run.
        most: what roundings may come to.

    Raises:
        RuntimeError: a side trains something else.
    """
    reference = next(iter(found))
    expected, apart = found[reference][0]["losses"], dict[str, float]()
    for side, runs in found.items():
        losses = runs[0]["losses"]
        if len(losses) != len(expected):
            raise RuntimeError(f"{side} took {len(losses)} steps instead of {len(expected)}")
        apart[side] = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        if not apart[side] <= most:
            raise RuntimeError(f"{side} does not train as {reference} does: {losses} instead of {expected}")
    return apart


def speeds(runs: Sequence[Measured], clock: str) -> list[float]:
    """Tokens per second of each round by `wall_seconds` or `cpu_seconds`."""
    return [run["tokens"] / run[clock] for run in runs]


def best_peer(values: Mapping[str, Sequence[float]], choose: Callable[[Iterable[float]], float]) -> float:
    """The best median among the peers that took part, by `max` or `min`; NaN without any."""
    medians = [median(own) for side, own in values.items() if side in PEERS]
    return choose(medians) if medians else float("nan")


def describe_peer(values: Mapping[str, Sequence[float]], best: float, word: str) -> str:
    """Describe the best peer for the short table: its median, its model, its name and how many peers took part.

    Args:
        values: of each round, by side.
        best: from `best_peer`.
        word: `fastest` or `least`.
    """
    peers = {side: median(own) for side, own in values.items() if side in PEERS}
    names = [title(side) for side, middle in peers.items() if middle == best]
    return f"{best:,.0f} (transformers' Llama, {names[0]}, {word} of {len(peers)} peers)" if names else "no peer"


def title(side: str) -> str:
    """A side as tables name it."""
    return PEERS[side][0] if side in PEERS else side
