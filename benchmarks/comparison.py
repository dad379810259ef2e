"""Running the sides of a comparison: each in its own process, in turn, round by round.

Times and memory are reported only after the losses of all sides have been found equal except for rounding, so a side
with other training steps cannot take part.
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
"""Number of initial steps that are not timed."""

PEERS: dict[str, tuple[str, str | None]] = {
    "raw": ("PyTorch loop", None),
    "hf": ("HF Trainer", "accelerate"),
    "lightning": ("Lightning", "lightning"),
    "accelerate": ("accelerate", "accelerate"),
}
"""Peers by command-line name: display name, and the required package in addition to torch and transformers."""

RESULT = "found.json"
"""File with the measurements of rank 0."""

TRAINED_ALIKE = (
    "optimizer=adamw",
    "optimizer.weight_decay=0",
    "scheduler=constant",
    "scheduler.warmup=0",
    "hparams.grad_clip_norm=1.0",
)
"""Overrides that give foundry the updates of a plain loop: AdamW at a constant learning rate, with clipping."""

LLAMA = ("model.qk_norm=false", "model.zero_init_outputs=false")
"""Overrides that make foundry's decoder a Llama."""

QUIET = (
    "tracking=none",
    "tracking.progress=false",
    "tracking.log_every_n_steps=1",
    "evaluation.interval=null",
    "evaluation.max_samples=1",
    "evaluation.write_samples=false",
    "checkpoint=none",
)
"""Overrides that disable everything except training and the loss of each step."""

Measured = dict[str, Any]
"""Measurements of one side in one round; see `meter.Meter.write`."""


def call(*arguments: str | Path, threads: int = 1) -> str:
    """Run a Python script or module and return its output.

    Args:
        arguments: arguments after `python`.
        threads: number of threads for torch.

    Raises:
        RuntimeError: the command failed; the message contains the end of its output.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(process.stdout + process.stderr)[-3000:]}")
    return process.stdout


def default_threads() -> int:
    """Return OMP_NUM_THREADS, or the number of cores if it is not set."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def run_job(script: str, *words: str, job: Mapping[str, Any], threads: int) -> Measured:
    """Write a job file beside the file of its measurements, run a script with it, and return the measurements.

    Args:
        script: name of a script in this folder, which is called with `words` and the job file.
        words: arguments before the job file.
        job: content of the job file; its key `measured` is the file that the script writes.
        threads: number of threads for torch.
    """
    file = Path(job["measured"]).with_name("job.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(job))
    call(HERE / script, *words, file, threads=threads)
    measured: Measured = json.loads(Path(job["measured"]).read_text())
    return measured


def run_ranks(function: Callable[..., None], options: argparse.Namespace, ranks: int) -> Any:
    """Call `function(rank, options, folder)` in one process per rank; return the content of `RESULT` that rank 0 wrote.

    Args:
        function: module-level function, which calls `join_ranks` first.
        options: passed to the function.
        ranks: number of ranks.
    """
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(function, (options, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        return json.loads(Path(folder, RESULT).read_text())


def join_ranks(rank: int, ranks: int, folder: str, backend: str = "gloo") -> None:
    """Join the process group of the ranks that `run_ranks` started; each rank computes on one thread."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def installed(sides: Iterable[str]) -> list[str]:
    """Return the sides whose packages are installed; print the other sides with an install command."""
    names = list[str]()
    for side in sides:
        package = PEERS[side][1] if side in PEERS else None
        if package is not None and find_spec(package) is None:
            print(f"{PEERS[side][0]} is left out: {package} is not installed (pip install -e '.[bench]')")
        else:
            names.append(side)
    return names


def in_turn(sides: Sequence[str], rounds: int, measure: Callable[[str, int], Measured]) -> dict[str, list[Measured]]:
    """Return the measurements of each side, one list entry per round; each round starts with the next side.

    Args:
        sides: sides in the order of the table.
        rounds: number of rounds, at least one.
        measure: function of the side and the round number.
    """
    measurements: dict[str, list[Measured]] = {side: [] for side in sides}
    for number in range(rounds):
        turn = number % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            measurements[side].append(measure(side, number))
    return measurements


def losses_apart(measurements: Mapping[str, Sequence[Measured]], *, tolerance: float = 0.01) -> dict[str, float]:
    """Return by how much each side's losses differ from the first side's: the largest relative difference of a step.

    Only the first round is compared.

    Args:
        measurements: result of `in_turn`, with `losses` of each run.
        tolerance: largest difference that rounding may cause.

    Raises:
        RuntimeError: a side took another number of steps, or its losses differ by more than the tolerance.
    """
    reference = next(iter(measurements))
    expected, apart = measurements[reference][0]["losses"], dict[str, float]()
    for side, runs in measurements.items():
        losses = runs[0]["losses"]
        if len(losses) != len(expected):
            raise RuntimeError(f"{side} took {len(losses)} steps instead of {len(expected)}")
        apart[side] = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        if not apart[side] <= tolerance:
            raise RuntimeError(f"{side} does not train as {reference} does: {losses} instead of {expected}")
    return apart


def speeds(runs: Sequence[Measured], clock: str) -> list[float]:
    """Return the tokens per second of each round, by `wall_seconds` or `cpu_seconds`."""
    return [run["tokens"] / run[clock] for run in runs]


def best_peer(values: Mapping[str, Sequence[float]], choose: Callable[[Iterable[float]], float]) -> float:
    """Return the best median among the measured peers, by `max` or `min`; NaN without peers."""
    medians = [median(times) for side, times in values.items() if side in PEERS]
    return choose(medians) if medians else float("nan")


def describe_peer(values: Mapping[str, Sequence[float]], best: float, word: str) -> str:
    """Describe the best peer for the short table: its median, its model, its name and the number of peers.

    Args:
        values: values of each round, by side.
        best: result of `best_peer`.
        word: `fastest` or `least`.
    """
    peers = {side: median(times) for side, times in values.items() if side in PEERS}
    names = [title(side) for side, middle in peers.items() if middle == best]
    return f"{best:,.0f} (transformers' Llama, {names[0]}, {word} of {len(peers)} peers)" if names else "no peer"


def title(side: str) -> str:
    """Return the display name of a side."""
    return PEERS[side][0] if side in PEERS else side
