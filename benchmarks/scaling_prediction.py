"""Predict the loss of a run from smaller runs with a scaling law, then train that run: `foundry scaling` on real runs.

    python benchmarks/scaling_prediction.py [--keep FOLDER]

Decoders of four widths train on the default text for three numbers of steps each. The law is fitted to these 12 runs,
and predicts the loss of a run with three times as many parameters and 1.15 times as many tokens as the largest, before
that run is trained. The learning rate of AdamW is 0.256 over the width, which was not tuned.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from comparison import LLAMA
from records import Column, Row, finish, parser

from foundry import compose, run

LAYERS, LEARNING_RATE_TIMES_WIDTH = 4, 0.256


@dataclass(frozen=True)
class Size:
    """Size of a run.

    Attributes:
        width: hidden size.
        steps: optimizer steps.
    """

    width: int
    steps: int

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward layers."""
        return 11 * self.width // 4

    @property
    def parameters(self) -> int:
        """Parameters without embeddings and head: matrices and norms of the blocks, and the last norm."""
        block = 4 * self.width**2 + 3 * self.width * self.feed_forward + 2 * self.width
        return LAYERS * block + self.width


@dataclass(frozen=True)
class Plan:
    """Sizes of the benchmark.

    Attributes:
        fitted: runs that the law is fitted to.
        large: the predicted run.
        seq_len: tokens of a sequence.
        batch_size: sequences of a step.
        evaluated: held-out sequences.
        resamples: resampled fits for the intervals.
    """

    fitted: tuple[Size, ...]
    large: Size
    seq_len: int = 256
    batch_size: int = 8
    evaluated: int = 256
    resamples: int = 300

    def tokens(self, size: Size) -> int:
        """Return the tokens of a run."""
        return size.steps * self.seq_len * self.batch_size

    def overrides(self, size: Size) -> list[str]:
        """Return the overrides of a run."""
        return [
            *LLAMA,
            f"model.hidden_size={size.width}",
            f"model.intermediate_size={size.feed_forward}",
            f"model.num_layers={LAYERS}",
            f"data.seq_len={self.seq_len}",
            f"hparams.global_batch_size={self.batch_size}",
            f"hparams.per_gpu_batch_size={self.batch_size}",
            f"hparams.max_steps={size.steps}",
            f"hparams.lr={LEARNING_RATE_TIMES_WIDTH / size.width:.6g}",
            f"evaluation.max_samples={self.evaluated}",
            "optimizer=adamw",
            "evaluation.interval=null",
            "evaluation.write_samples=false",
            "checkpoint.save_final=false",
            "tracking=none",
            "tracking.plots=false",
            "tracking.progress=false",
        ]


FULL = Plan(tuple(Size(*pair) for pair in product((32, 64, 96, 128), (250, 500, 1000))), Size(224, 1150))
SMOKE = Plan(tuple(Size(*pair) for pair in product((16, 24, 32), (8, 16, 32))), Size(64, 48), 32, 4, 32, 20)


def train(folder: Path, plan: Plan, number: int, size: Size) -> None:
    """Train a run in `runs/NUMBER` of the folder, unless it has finished there."""
    begin, run_dir = time.monotonic(), folder / "runs" / str(number)
    if not (run_dir / "result.json").exists():
        run(compose(plan.overrides(size)), run_dir)
    print(f"run {number}: width {size.width}, {size.steps} steps, {time.monotonic() - begin:.0f} s", flush=True)


def predict(folder: Path, plan: Plan, *words: str) -> dict[str, Any]:
    """Fit the law to the runs of the folder and return the JSON values of the command.

    Raises:
        RuntimeError: the command failed.
    """
    options = [f"dir={folder / 'runs'}", f"resamples={plan.resamples}", *words, "--json"]
    command = [sys.executable, "-m", "foundry.scaling", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def rows_of(facts: dict[str, Any]) -> list[Row]:
    """Return a row for each fitted run, and the last one for the predicted run."""
    rows = [
        Row(
            side=f"fitted, job {run['job']}",
            values={
                "parameters": [run["non_embedding_parameters"]],
                "tokens": [run["tokens"]],
                "loss": [run["loss"]],
                "predicted": [run["fitted"]],
                "interval": "",
                "error": [100 * (run["fitted"] / run["loss"] - 1)],
            },
        )
        for run in facts["runs"]
    ]
    (large,) = facts["held_out"]
    values = {
        "parameters": [large["non_embedding_parameters"]],
        "tokens": [large["tokens"]],
        "loss": [large["loss"]],
        "predicted": [large["predicted"]],
        "interval": _text(large["interval"]),
        "error": [100 * large["error"]],
    }
    return [*rows, Row(side="predicted before it was trained", values=values)]


def note_of(facts: dict[str, Any]) -> str:
    """Return the paragraph below the table, the law."""
    constants = ", ".join(
        f"{name} = {entry['value']:.4g} ({_text(entry['interval'])})"
        for name, entry in facts["law"]["constants"].items()
    )
    return (
        f"The law is {facts['law']['form']} with {constants}; 95 % intervals from "
        f"{facts['bootstrap']['resamples']:,} resamples in brackets."
    )


def _text(interval: list[float] | None) -> str:
    return "none" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}"


COLUMNS = [
    Column(key="parameters", heading="N"),
    Column(key="tokens", heading="D"),
    Column(key="loss", heading="held-out loss", format=".4f"),
    Column(key="predicted", heading="by the law", format=".4f"),
    Column(key="interval", heading="95 % interval"),
    Column(key="error", heading="error, %", format="+.2f"),
]


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train the fitted runs, predict the large one, train it; return the facts of the law.

    Raises:
        RuntimeError: the command failed, or the prediction changed after the large run was trained.
    """
    for number, size in enumerate(plan.fitted):
        train(folder, plan, number, size)
    number, large = len(plan.fitted), plan.large
    words = [f"exclude={number}"] if (folder / "runs" / str(number) / "result.json").exists() else []
    target = f"predict=N={large.parameters} D={plan.tokens(large)}"
    (before,) = predict(folder, plan, target, *words)["predictions"]
    print(f"predicted: {before['predicted']:.4f}, {_text(before['interval'])}", flush=True)
    train(folder, plan, number, large)
    facts = predict(folder, plan, f"hold_out={number}")
    (after,) = facts["held_out"]
    sizes = (after["non_embedding_parameters"], after["tokens"])
    if sizes != (large.parameters, plan.tokens(large)) or after["predicted"] != before["predicted"]:
        raise RuntimeError(f"the prediction was for another run: {before} and {after}")
    return facts


def main() -> None:
    """Measure the error of a prediction."""
    cli = parser(__doc__)
    cli.add_argument("--keep", type=Path, help="folder for all runs; runs that have finished there are not repeated")
    options: argparse.Namespace = cli.parse_args()
    with tempfile.TemporaryDirectory(prefix="scaling-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        facts = measure(SMOKE if options.smoke else FULL, folder)
    finish(options, side="run", columns=COLUMNS, rows=rows_of(facts), notes=[note_of(facts)])


if __name__ == "__main__":
    main()
