"""Best held-out loss by CPU seconds: a search with successive halving, and one that trains every job to its end.

    python benchmarks/successive_halving.py [--seeds 2]

Both sides train a small decoder on the default text and propose the same random learning rates, weight decays and
warm-ups, one job at a time in one process. The search without pruning has a third as many jobs, which take about as
many steps. The script reads the CPU time of the process whenever a job has recorded an evaluation. It includes imports
and the starts of jobs, and other processes on the machine change it little. The evaluations of all jobs count.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from records import ROOT, Column, Row, Values, finish, parser

from foundry.tracking.plot_style import BLUE, GREY, blank, save_figure

PICTURE = ROOT / "docs" / "images" / "successive_halving.png"
ASHA, ALL = "`pruner=asha`", "`pruner=null`"
COLOURS = {ASHA: BLUE, ALL: GREY}
STEPS, FIRST_RUNG, FACTOR = 270, 30, 3
SPACE = ["hparams.lr=tag(log,interval(1e-5,1e-1))", "optimizer.weight_decay=choice(0.0,0.1)"]
SPACE += ["scheduler.warmup=choice('0.02','0.1')"]
RUN = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "data.seq_len=32",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=8",
    "evaluation.max_samples=32",
    "evaluation.write_samples=false",
    "tracking=none",
    "tracking.plots=false",
]


@dataclass(frozen=True)
class Curve:
    """A search.

    Attributes:
        points: CPU seconds and held-out loss of each evaluation, in their order.
        jobs: number of jobs.
        steps: optimizer steps of all jobs.
        seconds: CPU seconds of the whole search.
    """

    points: list[tuple[float, float]]
    jobs: int
    steps: int
    seconds: float

    def best(self, seconds: float) -> float:
        """Return the lowest loss that was measured within these CPU seconds; infinity without a measurement."""
        return min((loss for when, loss in self.points if when <= seconds), default=math.inf)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def losses(sweep: Path) -> list[float]:
    """Return the held-out losses of all jobs that have been recorded so far."""
    lines = [line for file in sweep.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line)["val_loss"] for line in lines if line.endswith("}") and '"val_loss"' in line]


def search(folder: Path, side: str, seed: int, jobs: int, steps: int) -> Curve:
    """Run a search in a folder, and return its curve."""
    rung = steps * FIRST_RUNG // STEPS
    pruner = "hydra.sweeper.pruner=null"
    if side == ASHA:
        pruner = "hydra/sweeper/pruner=asha"
    words = [*RUN, *SPACE, pruner, "hydra/sweeper=optuna", "hydra/sweeper/sampler=random"]
    words += [f"hydra.sweeper.sampler.seed={seed}", f"hydra.sweeper.n_trials={jobs}", f"hparams.max_steps={steps}"]
    words += [
        f"evaluation.interval={'null' if side == ASHA else steps // FACTOR}",
        f"hydra.sweep.dir={folder / 'sweep'}",
    ]
    words += [f"hydra.sweeper.pruner.min_resource={rung}"] if side == ASHA else []
    points, known, seconds = list[tuple[float, float]](), list[float](), 0.0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "foundry", "-m", *words], cwd=folder, stdout=output, stderr=output, env=environment
        )
        while process.poll() is None:
            time.sleep(0.1)
            seconds = cpu_seconds(process.pid) or seconds
            current = losses(folder / "sweep")
            new = list(current)
            for loss in known:
                new.remove(loss)
            points += [(seconds, loss) for loss in new]
            known = current
    assert process.returncode == 0, (folder / "output.txt").read_text()
    results = [json.loads(file.read_text()) for file in (folder / "sweep").glob("*/result.json")]
    return Curve(points, len(results), sum(result["step"] for result in results), seconds)


def best_losses(searches: list[Curve], budget: float) -> Values:
    """Return the lowest loss of each search within a budget of CPU seconds; a text if a search has measured none."""
    best = [curve.best(budget) for curve in searches]
    return best if all(map(math.isfinite, best)) else "no evaluation yet"


def draw(curves: dict[str, list[Curve]], file: Path) -> None:
    """Draw the best loss so far against CPU seconds; a line for each search."""
    figure = blank((8, 3.6), bottom=0.16, top=0.96)
    axes = figure.add_subplot()
    for side, searches in curves.items():
        for number, curve in enumerate(searches):
            times = sorted({when for when, _ in curve.points})
            best = [curve.best(when) for when in times]
            label = side.replace("`", "") if number == 0 else None
            axes.step([*times, curve.seconds], [*best, best[-1]], where="post", color=COLOURS[side], label=label)
    axes.set_xlabel("CPU seconds of the search")
    axes.set_ylabel("best held-out loss so far")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False)
    save_figure(figure, file)


def main() -> None:
    """Run both sides with each seed, alternately."""
    cli = parser(__doc__)
    cli.add_argument("--seeds", type=int, default=2)
    cli.add_argument("--jobs", type=int, default=27, help="jobs of the search with successive halving")
    options: argparse.Namespace = cli.parse_args()
    jobs, steps, seeds = (9, 9, 1) if options.smoke else (options.jobs, STEPS, options.seeds)
    curves: dict[str, list[Curve]] = {ASHA: [], ALL: []}
    for seed in range(seeds):
        for side in curves if seed % 2 == 0 else reversed(curves):
            with tempfile.TemporaryDirectory(prefix="halving-") as folder:
                number = jobs if side == ASHA else jobs // FACTOR
                curves[side].append(search(Path(folder), side, seed, number, steps))
    budget = min(curve.seconds for searches in curves.values() for curve in searches)
    budgets = [round(budget * share) for share in (1 / 3, 2 / 3, 1)]
    rows = [
        Row(
            side=side,
            values={
                "jobs": [curve.jobs for curve in searches],
                "steps": [curve.steps for curve in searches],
                "seconds": [curve.seconds for curve in searches],
                **{f"at_{n}": best_losses(searches, budget) for n, budget in enumerate(budgets)},
                "end": [curve.best(curve.seconds) for curve in searches],
            },
        )
        for side, searches in curves.items()
    ]
    columns = [
        Column(key="jobs", heading="jobs"),
        Column(key="steps", heading="steps", spread=True),
        Column(key="seconds", heading="CPU s", spread=True),
        *(Column(key=f"at_{n}", heading=f"after {s} s", format=".3f", spread=True) for n, s in enumerate(budgets)),
        Column(key="end", heading="at the end", format=".3f", spread=True),
    ]
    finish(options, side="search", columns=columns, rows=rows)
    if not options.smoke:
        draw(curves, PICTURE)


if __name__ == "__main__":
    main()
