"""Tokens per second and peak memory of foundry beside a raw loop, HF Trainer, Lightning and accelerate.

    python -m pip install .[bench]
    python benchmarks/throughput.py [--cases fp32-8k ...] [--sides raw ...] [--steps 12] [--rounds 3] [--threads 2]

A decoder of 4 layers of width 256 reads 16 sequences of 256 tokens a step, in 4 microbatches. Every run is a process of
its own; sides take turns, round by round, and the first steps of each are not timed. Losses of every step are compared
with the raw loop's before any time is printed. Printed are medians over the rounds of tokens per second of wall and of
CPU time, the ratio to the fastest peer, the spread, and the largest resident set above that of `import torch`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
NUM_WARMUP = 3
CASES = {
    f"{precision}-{size}k": (mode, vocab)
    for size, vocab in (("8", 8192), ("32", 32768))
    for precision, mode in (("fp32", "fp32"), ("bf16", "amp_bfloat16"))
}
PEERS = {"raw": None, "hf": "accelerate", "lightning": "lightning", "accelerate": "accelerate"}
SHAPE = (
    "model.hidden_size=256",
    "model.intermediate_size=704",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.max_seq_len=256",
)
COMMON = (
    "optimizer=adamw",
    "optimizer.weight_decay=0",
    "scheduler=constant",
    "scheduler.warmup=0",
    "hparams.grad_clip_norm=1.0",
    "tracking=none",
    "tracking.progress=false",
    "tracking.log_every_n_steps=1",
    "evaluation.interval=null",
    "evaluation.max_samples=1",
    "evaluation.write_samples=false",
    "checkpoint=none",
)


def call(threads: int, *arguments: str | Path) -> str:
    """Run Python and give what it prints.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(found.stdout + found.stderr)[-3000:]}")
    return found.stdout


def make_weights(folder: Path, vocab_size: int, threads: int) -> Path:
    """The initial weights, as a folder of transformers; and as a run whose export they are."""
    run = folder / f"initial_{vocab_size}"
    tiny = ("hparams.max_steps=1", "hparams.lr=1e-30", "hparams.global_batch_size=1", "hparams.per_gpu_batch_size=1")
    overrides = ("data.seq_len=256", *SHAPE, f"model.vocab_size={vocab_size}", *tiny, "precision=fp32", *COMMON[:3])
    call(threads, "-m", "foundry", *overrides, "tracking=none", "tracking.progress=false", f"hydra.run.dir={run}")
    call(threads, "-m", "foundry.export", f"run={run}", f"out={run}_hf")
    return Path(f"{run}_hf")


def write_job(folder: Path, side: str, case: str, weights: Path, steps: int) -> Path:
    """The job of one side in one round."""
    mode, vocab_size = CASES[case]
    folder.mkdir(parents=True)
    sizes = {"batch_size": 16, "per_gpu_batch_size": 4, "seq_len": 256, "vocab_size": vocab_size}
    native = (*SHAPE, f"model.vocab_size={vocab_size}", f"model.init_from={weights}")
    model = native if side == "foundry" else ("model=hf", f"model.path={weights}")
    overrides = [
        *model,
        *COMMON,
        f"precision={mode}",
        "hparams.lr=1e-3",
        f"hparams.max_steps={steps}",
        "hparams.seed=0",
        "hparams.global_batch_size=16",
        "hparams.per_gpu_batch_size=4",
    ]
    job = {
        **sizes,
        "measured": str(folder / "measured.json"),
        "steps": steps,
        "num_warmup": NUM_WARMUP,
        "seed": 0,
        "lr": 1e-3,
        "precision": mode,
        "model": str(weights),
        "overrides": overrides,
    }
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    return file


def compare_losses(found: dict[str, list[dict[str, Any]]], reference: str) -> dict[str, float]:
    """By how much each side's losses differ from the reference's at most, relatively.

    Raises:
        RuntimeError: a side trains something else.
    """
    expected, apart = found[reference][0]["losses"], dict[str, float]()
    for side, runs in found.items():
        losses = runs[0]["losses"]
        if len(losses) != len(expected):
            raise RuntimeError(f"{side} took {len(losses)} steps instead of {len(expected)}")
        apart[side] = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        if apart[side] > 0.01:
            raise RuntimeError(f"{side} does not train as {reference} does: {losses} instead of {expected}")
    return apart


def show(case: str, found: dict[str, list[dict[str, Any]]], imported_mib: float) -> None:
    """Print one case's table."""
    reference = next(iter(found))
    apart = compare_losses(found, reference)
    speeds = {
        clock: {side: [run["tokens"] / run[clock] for run in runs] for side, runs in found.items()}
        for clock in ("wall_seconds", "cpu_seconds")
    }
    peers = [side for side in found if side in PEERS]
    columns = [
        "tokens/s, wall",
        "of the fastest peer",
        "of CPU time",
        "of the fastest peer",
        "peak, MiB",
        "losses apart",
    ]
    print(f"\n| {case} | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    for side, runs in found.items():
        columns = []
        for by_side in speeds.values():
            best = max((median(by_side[peer]) for peer in peers), default=float("nan"))
            own = by_side[side]
            columns += [f"{median(own):,.0f} ({min(own):,.0f}-{max(own):,.0f})", f"{median(own) / best:.2f}"]
        peak = median(run["peak_mib"] for run in runs) - imported_mib
        print(f"| {side} | {' | '.join(columns)} | {peak:,.0f} | {apart[side]:.1e} |")


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--sides", nargs="+", default=[*PEERS, "foundry", "foundry, model=hf"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    sides = []
    for side in options.sides:
        package = PEERS.get(side)
        if package is not None and find_spec(package) is None:
            print(f"{side} is left out: {package} is not installed")
        else:
            sides.append(side)
    peak = "import resource, torch; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    imported_mib = float(call(options.threads, "-c", peak))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["FOUNDRY_CACHE"] = str(folder / "cache")
        for case in options.cases:
            weights = make_weights(folder / case, CASES[case][1], options.threads)
            found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for number in range(options.rounds):
                for side in sides:
                    job = write_job(folder / case / f"{side}_{number}", side, case, weights, options.steps)
                    call(options.threads, HERE / "throughput_sides.py", side.partition(",")[0], job)
                    found[side].append(json.loads((job.parent / "measured.json").read_text()))
            show(case, found, imported_mib)


if __name__ == "__main__":
    main()
