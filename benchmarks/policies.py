"""Success rates of trained policies and the cost of their training: the commands of docs/tasks/robots.md.

    OMP_NUM_THREADS=1 python benchmarks/policies.py [TABLE] [--only TRAINING ...]

Every policy is trained by `python -m foundry` in its own process, one after the other. `foundry eval` evaluates its
final weights in episodes from 5,000 on (from 6,000 on for `vla`); no setting or checkpoint was selected with these
episodes. Processor time is that of the training process with its evaluations, without the generation of
demonstrations, which an earlier run of one step has done. Policies whose simulator is not installed are skipped.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from records import Column, Headline, Row, finish, parser

SMALL = (
    "debug=fast",
    "data.episodes=8",
    "hparams.max_steps=1",
    "model.num_layers=1",
    "evaluation.interval=null",
    "evaluation.evaluators.success.episodes=2",
)
SMALL_VLM = (
    "debug=fast",
    "data.num_scenes=40",
    "hparams.max_steps=1",
    "evaluation.interval=null",
    *(f"model.{size}" for size in ("num_layers=1", "hidden_size=32", "num_heads=2", "num_kv_heads=2")),
)
SMALL_VLA = (
    *(word for word in SMALL if not word.startswith("model.")),
    *(f"model.backbone.{word.removeprefix('model.')}" for word in SMALL_VLM if word.startswith("model.")),
)
COLUMNS = (
    Column(key="episodes", heading="episodes"),
    Column(key="success", heading="success", format=".3f"),
    Column(key="low", heading="95 % from", format=".3f"),
    Column(key="high", heading="to", format=".3f"),
    Column(key="cpu", heading="CPU-seconds of training"),
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run.

    Attributes:
        words: arguments of `python -m foundry`; `RUNS` is the folder of the runs, with earlier trainings by name.
        needs: module that the simulator requires.
        small: further arguments with `--smoke`, for a run of seconds.
    """

    words: tuple[str, ...]
    needs: str = "mujoco"
    small: tuple[str, ...] = SMALL


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row: the policy of a training in its simulator.

    Attributes:
        of: name of the training.
        case: first argument of the training, as shown on the page.
        side: difference from other rows of the case.
        episodes: number of episodes.
        words: further arguments of `foundry eval`.
    """

    of: str
    case: str
    side: str
    episodes: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Trainings by name, in execution order, and rows of their policies, evaluated from episode `first_episode` on."""

    trainings: Mapping[str, Training]
    rows: Sequence[Measured]
    first_episode: int = 5000


AROUND, FETCH, IMAGES = "hparams=policy", "experiment=fetch_push", "experiment=around_images"
TOLD, ANOTHER, ON_VLM = "experiment=vla_touch", ("instruction=other",), "from `experiment=vlm_scenes`"
DIFFUSION, REGRESSION = "`diffusion_policy`", "`action_regression`"
FETCHES = "gymnasium_robotics"

TABLES = {
    "policies": Table(
        trainings={
            "around": Training(words=(AROUND,)),
            "around_1": Training(words=(AROUND, "hparams.seed=1")),
            "around_2": Training(words=(AROUND, "hparams.seed=2")),
            "around_regression": Training(words=(AROUND, "objective=action_regression")),
            "fetch": Training(words=(FETCH,), needs=FETCHES),
            "fetch_regression": Training(words=(FETCH, "objective=action_regression"), needs=FETCHES),
            "fetch_untrained": Training(words=(FETCH, "hparams.max_steps=1"), needs=FETCHES),
            "images": Training(words=(IMAGES,)),
        },
        rows=(
            Measured(of="around", case=AROUND, side=DIFFUSION, episodes=400),
            Measured(of="around_1", case=AROUND, side=f"{DIFFUSION}, seed 1", episodes=400),
            Measured(of="around_2", case=AROUND, side=f"{DIFFUSION}, seed 2", episodes=400),
            Measured(of="around_regression", case=AROUND, side=REGRESSION, episodes=400),
            Measured(of="fetch", case=FETCH, side=DIFFUSION, episodes=200),
            Measured(of="fetch_regression", case=FETCH, side=REGRESSION, episodes=200),
            Measured(of="fetch_untrained", case=FETCH, side="after one step", episodes=200),
            Measured(of="images", case=IMAGES, side=DIFFUSION, episodes=200),
        ),
    ),
    "vla": Table(
        trainings={
            "vlm": Training(words=("experiment=vlm_scenes",), small=SMALL_VLM),
            "vla": Training(words=(TOLD, "model.backbone.init_from=RUNS/vlm"), small=SMALL_VLA),
            "vla_alone": Training(words=(TOLD,), small=SMALL_VLA),
        },
        rows=(
            Measured(of="vla", case=TOLD, side=ON_VLM, episodes=200),
            Measured(
                of="vla",
                case=TOLD,
                side=f"{ON_VLM}, told another colour",
                episodes=200,
                words=ANOTHER,
            ),
            Measured(of="vla_alone", case=TOLD, side="from nothing", episodes=200),
            Measured(of="vla_alone", case=TOLD, side="from nothing, told another colour", episodes=200, words=ANOTHER),
        ),
        first_episode=6000,
    ),
}
"""Tables by name; each is a record of this name, and a section of docs/benchmarks.md."""


def call(module: str, words: Sequence[str], cache: Path) -> float:
    """Run a foundry command on one thread and return its processor seconds; raise a RuntimeError if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FOUNDRY_CACHE": str(cache)}
    before = processor_seconds()
    process = subprocess.run([sys.executable, "-m", module, *words], env=environment, capture_output=True, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"{module} {' '.join(words)} failed:\n{process.stdout}{process.stderr}")
    return processor_seconds() - before


def processor_seconds() -> float:
    """Return the processor seconds of all ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(training: Training, runs: Path, name: str, *, is_small: bool) -> float:
    """Run a training and return its processor seconds; unless `is_small`, an earlier run makes the demonstrations."""
    words = [word.replace("RUNS", str(runs)) for word in training.words]
    words += ["tracking=none", *(training.small if is_small else ())]
    if not is_small:
        once = ["hparams.max_steps=1", "evaluation.interval=null", f"hydra.run.dir={runs / f'{name}_once'}"]
        call("foundry", [*words, *once], runs / "cache")
    return call("foundry", [*words, f"hydra.run.dir={runs / name}"], runs / "cache")


def measure(row: Measured, runs: Path, episodes: int, first: int) -> dict[str, Any]:
    """Evaluate the policy of a row with `foundry eval`, and return the command's result."""
    out = runs / "eval.json"
    words = [f"run={runs / row.of}", f"episodes={episodes}", f"first_episode={first}", f"out={out}", *row.words]
    call("foundry.eval", words, runs / "cache")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("table", nargs="?", choices=TABLES, default="policies", help="default: policies")
    cli.add_argument("--only", nargs="+", metavar="TRAINING", help="these, and the trainings that they start from")
    options = cli.parse_args()
    table, rows = TABLES[options.table], list[Row]()
    processor, measured = dict[str, float](), dict[tuple[str, str], dict[str, float]]()
    if unknown := set(options.only or ()) - set(table.trainings):
        cli.error(f"no training is called {', '.join(sorted(unknown))}; there are {', '.join(table.trainings)}")
    trainings = {name: item for name, item in table.trainings.items() if name in (options.only or table.trainings)}
    available = {name: item for name, item in trainings.items() if find_spec(item.needs) is not None}
    left_out = sorted({item.needs for name, item in trainings.items() if name not in available})
    with tempfile.TemporaryDirectory(prefix="policies-") as folder:
        runs = Path(folder)
        for name, training in available.items():
            processor[name] = train(training, runs, name, is_small=options.smoke)
            print(f"{name}: {processor[name]:.0f} CPU-seconds", flush=True)
        for row in table.rows:
            if row.of not in available:
                continue
            result = measure(row, runs, 2 if options.smoke else row.episodes, table.first_episode)
            rates = {"success": result["success"], "low": result["success_low"], "high": result["success_high"]}
            values = {"episodes": result["num_episodes"], **rates, "cpu": processor[row.of]}
            measured[row.case, row.side] = values
            rows.append(Row(case=f"`{row.case}`", side=row.side, values={key: [item] for key, item in values.items()}))
            print(f"{row.of} {' '.join(row.words)}: {result['success']:.3f}", flush=True)
    notes = [f"Skipped trainings that need missing packages: {', '.join(left_out)}."] if left_out else []
    for name in available.keys() - {row.of for row in table.rows}:
        notes.append(f"`{' '.join(available[name].words)}` takes {processor[name]:.0f} CPU-seconds.")
    finish(
        options,
        name=options.table,
        case="command",
        side="policy",
        columns=COLUMNS,
        rows=rows,
        notes=notes,
        headlines=headlines(measured),
    )


def headlines(measured: Mapping[tuple[str, str], Mapping[str, float]]) -> list[Headline]:
    """Return the headlines of the table `policies`: success rate with its interval, and the cost of training."""
    first, beside = (measured.get((AROUND, side)) for side in (DIFFUSION, REGRESSION))
    if first is None or beside is None:
        return []
    success, other = (f"{item['success']:.2f} ({item['low']:.2f} to {item['high']:.2f})" for item in (first, beside))
    return [
        Headline(
            what="A diffusion policy from nothing, share of episodes with success (95 % interval)",
            foundry=f"{success} after {first['cpu']:.0f} CPU-seconds",
            beside=f"{other} foundry's regression after {beside['cpu']:.0f}",
        )
    ]


if __name__ == "__main__":
    main()
