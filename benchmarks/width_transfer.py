"""Best learning rate by width, with and without the maximal update parametrization.

    OMP_NUM_THREADS=1 python benchmarks/width_transfer.py [--optimizers adamw muon] [--jobs 1] [--keep FOLDER]

Decoders of four widths with the same head size, depth and data train at six learning rates, with
`model.parametrization` standard and mup. The standard deviation of the initial weights of their matrices is computed
from the width, for both parametrizations. At the base width, the narrowest, both are the same run. The table has the
held-out loss of each run. A note has the best rate of each width, and the loss that each width pays for the best rate
of the narrowest one.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from records import Column, Row, finish, parser

from foundry import compose, run

OPTIMIZERS = "adamw", "muon"
PARAMETRIZATIONS = "standard", "mup"


@dataclass(frozen=True)
class Plan:
    """Sizes of the benchmark.

    Attributes:
        widths: hidden sizes; the first is the base width.
        head_size: size of an attention head, at all widths.
        rates: learning rates, each twice the one before.
        steps: optimizer steps of a run.
        seq_len: tokens of a sequence.
        evaluated: held-out sequences.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)
    head_size: int = 64
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
    steps: int = 200
    seq_len: int = 128
    evaluated: int = 256


@dataclass(frozen=True)
class Run:
    """A run of the benchmark."""

    optimizer: str
    parametrization: str
    width: int
    lr: float

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return f"{self.optimizer}-{self.parametrization}-{self.width}-{self.lr:g}"

    def overrides(self, plan: Plan) -> list[str]:
        """Return the overrides of the run."""
        heads = self.width // plan.head_size
        return [
            f"optimizer={self.optimizer}",
            f"model.parametrization={self.parametrization}",
            *([f"model.base_width={plan.widths[0]}"] if self.parametrization == "mup" else []),
            f"model.hidden_size={self.width}",
            f"model.intermediate_size={11 * self.width // 4}",
            f"model.num_heads={heads}",
            f"model.num_kv_heads={heads}",
            "model.num_layers=2",
            "model.init_std=small",
            f"data.seq_len={plan.seq_len}",
            f"hparams.lr={self.lr}",
            f"hparams.max_steps={plan.steps}",
            f"evaluation.max_samples={plan.evaluated}",
            "evaluation.interval=null",
            "evaluation.write_samples=false",
            "checkpoint=none",
            "tracking=none",
            "tracking.plots=false",
            "tracking.progress=false",
        ]


FULL = Plan()
SMOKE = Plan(widths=(16, 32), head_size=16, rates=(2e-3, 4e-3), steps=3, seq_len=32, evaluated=8)


def train(job: Run, plan: Plan, folder: Path) -> float:
    """Train a run in the folder, unless it has finished there; return the held-out loss, infinite if it diverged."""
    result = folder / job.name / "result.json"
    if not result.exists():
        run(compose(job.overrides(plan)), folder / job.name)
        print(f"{job.name}: {json.loads(result.read_text())['val_loss']:.4f}", flush=True)
    loss = json.loads(result.read_text())["val_loss"]
    return math.inf if loss is None or not math.isfinite(loss) else float(loss)


def jobs_of(plan: Plan, optimizers: Sequence[str]) -> list[Run]:
    """Return all runs, wide ones first, so that processes end at about the same time; `mup` shares the narrowest."""
    return [
        Run(optimizer, parametrization, width, lr)
        for width in reversed(plan.widths)
        for optimizer in optimizers
        for parametrization in PARAMETRIZATIONS[: 1 if width == plan.widths[0] else None]
        for lr in plan.rates
    ]


def losses_of(found: dict[Run, float], plan: Plan, optimizer: str, parametrization: str, width: int) -> list[float]:
    """Return the losses of a width by rate."""
    own = "standard" if width == plan.widths[0] else parametrization
    return [found[Run(optimizer, own, width, lr)] for lr in plan.rates]


def rows_of(found: dict[Run, float], plan: Plan, optimizers: Sequence[str]) -> list[Row]:
    """Return a row for each optimizer, parametrization and width."""
    rows = list[Row]()
    for optimizer in optimizers:
        for parametrization in PARAMETRIZATIONS:
            for width in plan.widths:
                losses = losses_of(found, plan, optimizer, parametrization, width)
                values = {f"rate{number}": [loss] for number, loss in enumerate(losses)}
                best = losses.index(min(losses))
                rows.append(
                    Row(
                        case=f"{optimizer}, {parametrization}",
                        side=str(width),
                        values={**values, "best": f"{plan.rates[best]:g}"},
                    )
                )
    return rows


def notes_of(found: dict[Run, float], plan: Plan, optimizers: Sequence[str]) -> list[str]:
    """Return a sentence for each optimizer and parametrization: how far the best rate of a width is from the base's."""
    notes = list[str]()
    for optimizer in optimizers:
        for parametrization in PARAMETRIZATIONS:
            by_width = [losses_of(found, plan, optimizer, parametrization, width) for width in plan.widths]
            places = [losses.index(min(losses)) for losses in by_width]
            steps = [place - places[0] for place in places[1:]]
            paid = [losses[places[0]] - min(losses) for losses in by_width[1:]]
            steps_text, paid_text = ", ".join(f"{step:+d}" for step in steps), ", ".join(f"{loss:.3f}" for loss in paid)
            notes.append(
                f"{optimizer}, {parametrization}: the best rates of widths {', '.join(map(str, plan.widths[1:]))} are "
                f"{steps_text} steps of the grid (factors of 2) from that of width {plan.widths[0]}; training at the "
                f"rate of width {plan.widths[0]} costs {paid_text} of loss."
            )
    return notes


def main() -> None:
    """Train all runs."""
    cli = parser(__doc__)
    cli.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    cli.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    cli.add_argument("--keep", type=Path, help="folder for all runs; runs that have finished there are not repeated")
    options: argparse.Namespace = cli.parse_args()
    plan = SMOKE if options.smoke else FULL
    jobs = jobs_of(plan, options.optimizers)
    with tempfile.TemporaryDirectory(prefix="widths-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            losses = pool.map(train, jobs, [plan] * len(jobs), [folder] * len(jobs))
            found = dict(zip(jobs, losses, strict=True))
    columns = [Column(key=f"rate{n}", heading=f"lr {rate:g}", format=".4f") for n, rate in enumerate(plan.rates)]
    columns.append(Column(key="best", heading="best lr"))
    rows, notes = rows_of(found, plan, options.optimizers), notes_of(found, plan, options.optimizers)
    finish(options, case="optimizer, parametrization", side="width", columns=columns, rows=rows, notes=notes)


if __name__ == "__main__":
    main()
