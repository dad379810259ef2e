"""Held-out loss of the default run and of other recipes, by seed and corpus, and milliseconds of a step.

    OMP_NUM_THREADS=1 python benchmarks/default_recipe.py [--seeds 5] [--jobs 2] [--keep DIR]

All recipes train the same data and tokens. The default is the command `python -m foundry`. The former default has a
cosine schedule, no norms of queries and keys, and one learning rate for all parameters. Each further side has one
option of the former default. Other corpora are the documentation of this project and the C headers of Python, in
fewer steps. Afterwards steps are timed, in short runs of both recipes in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from comparison import in_turn
from records import ROOT, Column, Headline, Row, Values, finish, parser
from scipy.stats import t as student  # type: ignore[import-untyped]

RECIPE, FORMER = "default", "former default"
OPTIONS = {
    "one learning rate": ["optimizer.groups.embeddings.lr_mult=1", "optimizer.groups.head.lr_mult=1"],
    "cosine decay": ["scheduler=cosine"],
    "beta1=0.9": ["optimizer.beta1=0.9"],
    "beta2=0.95": ["optimizer.beta2=0.95"],
    "no warm-up of the momentum": ["optimizer.momentum_warmup_start=null"],
    "no norms of queries and keys": ["model.qk_norm=false"],
    "no zero matrices": ["model.zero_init_outputs=false"],
}
"""Options of the former recipe, as overrides of the default."""
SIDES = {
    RECIPE: [],
    FORMER: [word for words in OPTIONS.values() for word in words],
    **{f"default with {name}": words for name, words in OPTIONS.items()},
}
DEFAULT_CORPUS = "standard library"
SHORT = ["hparams.max_steps=200"]
CORPORA = {
    DEFAULT_CORPUS: [],
    "documentation": ["data=text", f"data.path='{ROOT}/docs/*.md'", *SHORT],
    "C headers": ["data=text", *SHORT],
}
QUIET = ["tracking=none", "tracking.progress=false", "checkpoint=none", "evaluation.write_samples=false"]
SMOKE = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=1"),
    *("data.seq_len=64", "hparams.max_steps=3", "evaluation.max_samples=8"),
]
TIMED_STEPS, UNTIMED_STEPS = 30, 5


@dataclass(frozen=True)
class Run:
    """A run of one recipe.

    Attributes:
        corpus: key of `CORPORA`.
        side: key of `SIDES`.
        seed: `hparams.seed`.
    """

    corpus: str
    side: str
    seed: int

    def loss(self, folder: Path, more: list[str]) -> float:
        """Return the held-out loss; a run that has finished in the folder is not repeated."""
        name = f"{self.corpus} {self.side} {self.seed}".replace(" ", "_").replace("=", "")
        words = [*CORPORA[self.corpus], *SIDES[self.side], f"hparams.seed={self.seed}", *more]
        if self.corpus == "C headers":
            words.append(f"data.path='{write_headers(folder / 'headers')}/*.txt'")
        train(folder / name, words)
        loss: float = json.loads((folder / name / "result.json").read_text())["val_loss"]
        return loss


def write_headers(folder: Path) -> Path:
    """Copy Python's C headers to a folder as text files, unless it exists, and return the folder."""
    if not folder.exists():
        folder.mkdir()
        include = Path(sysconfig.get_paths()["include"])
        for path in sorted(include.rglob("*.h")):
            name = "_".join(path.relative_to(include).with_suffix(".txt").parts)
            (folder / name).write_bytes(path.read_bytes())
    return folder


def train(run_dir: Path, words: list[str]) -> None:
    """Train in a directory, unless it has a result.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    if (run_dir / "result.json").exists():
        return
    command = [sys.executable, "-m", "foundry", *words, *QUIET, f"hydra.run.dir={run_dir}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(process.stdout + process.stderr)[-3000:]}")


def step_milliseconds(folder: Path, side: str, number: int, more: list[str]) -> float:
    """Return the median milliseconds of a step of a short run."""
    run_dir = folder / f"timed_{side.replace(' ', '_')}_{number}"
    length = [f"hparams.max_steps={TIMED_STEPS}", "evaluation.interval=null", "evaluation.max_samples=8"]
    train(run_dir, [*SIDES[side], *more, *length, "tracking.log_every_n_steps=1"])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line and line["step"] > UNTIMED_STEPS]
    return 1000 * float(statistics.median(seconds))


def mean_and_interval(values: list[float]) -> str:
    """Return the mean with the 95 % interval of Student's t distribution, or the value if there is one only."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.4f} ± {half:.4f}"


def main() -> None:
    """Run all recipes, time the steps, and write the record."""
    cli = parser(__doc__)
    cli.add_argument("--seeds", type=int, default=5, help="seeds of the default")
    cli.add_argument("--former-seeds", type=int, default=5, help="seeds of the former default")
    cli.add_argument("--option-seeds", type=int, default=2, help="seeds of the sides with one other option")
    cli.add_argument("--corpus-seeds", type=int, default=2, help="seeds of each other corpus")
    cli.add_argument("--jobs", type=int, default=1, help="runs at the same time; steps are timed one run at a time")
    cli.add_argument("--rounds", type=int, default=3, help="timed runs of each recipe")
    cli.add_argument("--keep", type=Path, help="folder of the runs; finished runs in it are not repeated")
    options: argparse.Namespace = cli.parse_args()
    more = SMOKE if options.smoke else []
    runs = [Run(DEFAULT_CORPUS, RECIPE, seed) for seed in range(options.seeds)]
    runs += [Run(DEFAULT_CORPUS, FORMER, seed) for seed in range(options.former_seeds)]
    runs += [Run(DEFAULT_CORPUS, f"default with {name}", s) for name in OPTIONS for s in range(options.option_seeds)]
    runs += [
        Run(c, s, n)
        for c in CORPORA
        if c != DEFAULT_CORPUS
        for s in (RECIPE, FORMER)
        for n in range(options.corpus_seeds)
    ]
    with tempfile.TemporaryDirectory(prefix="recipe-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            losses = dict(zip(runs, pool.map(lambda run: run.loss(folder, more), runs), strict=True))

        def measure(side: str, number: int) -> dict[str, float]:
            return {"ms": step_milliseconds(folder, side, number, more)}

        timed = in_turn([RECIPE, FORMER], options.rounds, measure)
    rows = list[Row]()
    for corpus, side in dict.fromkeys((run.corpus, run.side) for run in runs):
        found = [loss for run, loss in losses.items() if (run.corpus, run.side) == (corpus, side)]
        values: dict[str, Values] = {"loss": mean_and_interval(found), "seeds": [float(len(found))], "each": found}
        if corpus == DEFAULT_CORPUS and side in timed:
            values["ms"] = [each["ms"] for each in timed[side]]
        rows.append(Row(case=corpus, side=side, values=values))
    means = [
        mean_and_interval([losses[run] for run in runs if run.side == side and run.corpus == DEFAULT_CORPUS])
        for side in (RECIPE, FORMER)
    ]
    finish(
        options,
        case="corpus",
        side="recipe",
        columns=[
            Column(key="loss", heading="held-out loss, mean ± 95 % interval"),
            Column(key="seeds", heading="seeds"),
            Column(key="each", heading="median (range)", format=".4f", spread=True),
            Column(key="ms", heading="ms a step", format=".0f", spread=True),
        ],
        rows=rows,
        headlines=[
            Headline(what="Held-out loss of the default run", foundry=means[0], beside=f"{means[1]} (former default)")
        ],
    )


if __name__ == "__main__":
    main()
