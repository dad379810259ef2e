"""SFT, DPO and GRPO beside TRL's trainers: same weights, rows, order and hyperparameters, each run its own process.

    python -m pip install trl  # no dependency of foundry's
    python benchmarks/finetuning_trl.py [sft] [dpo] [grpo] [--steps 50] [--seeds 42 1] [--at-once 1] [--bases FOLDER]

foundry's side is `run()` of a composed configuration. For each method shown are: useful tokens (no padding; in GRPO
those that were generated, all of which are trained on) per second of CPU time without the first steps, the
largest resident set, how far it grew from before the first step, and by how much losses of a step differ from TRL's.
Of GRPO, whose two sides draw different answers, the mean reward of each quarter of the run. Every run has one thread.
`--at-once 2` runs two side by side, for a machine that has nothing else to do. Times are compared only within one call.
"""

import json
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison import HERE, NUM_WARMUP, QUIET, TRAINED_ALIKE, call, speeds
from records import Column, Headline, Row, Values, finish, parser


@dataclass(frozen=True)
class Method:
    """How one is run on both sides.

    Attributes:
        base: the weights that it starts from, see `make_bases`.
        lr: constant.
        batch_size: samples of a step: conversations, pairs or answers.
        per_gpu_batch_size: of a microbatch.
        overrides: foundry's own.
        job: what TRL's side is told besides.
        packs: whether foundry can put several samples into a row.
    """

    base: str
    lr: float
    batch_size: int
    per_gpu_batch_size: int
    overrides: tuple[str, ...]
    job: dict[str, Any] = field(default_factory=dict)
    packs: bool = False


METHODS = {
    "sft": Method("ragged", 3e-4, 32, 8, ("data=chats", "objective=sft", "data.seq_len=512"), packs=True),
    "dpo": Method(
        "sums",
        2e-5,
        16,
        16,
        ("data=preferences", "objective=dpo", "objective.ref_policy_kl_penalty=0.1", "data.seq_len=160"),
        {"beta": 0.1},
    ),
    "grpo": Method(
        "sums",
        1e-4,
        128,
        64,
        (
            "data=prompts",
            "data.seq_len=160",
            "environment=arithmetic",
            "environment.weights.format=0",
            "evaluation=reward",
            "objective=grpo",
            "objective.num_prompts_per_step=16",
            "objective.num_generations_per_prompt=8",
            "objective.generation_batch_size=128",
            "objective.generation_top_p=1.0",
            "objective.generation_top_k=null",
            "objective.max_new_tokens=48",
            "objective.use_rloo=false",
            "objective.ref_policy_kl_penalty=0",
        ),
        {"num_generations": 8, "max_new_tokens": 48, "beta": 0.0},
    ),
}
COLUMNS = [
    Column(key="speed", heading="useful tokens/s of CPU time", spread=True),
    Column(key="of_speed", heading="of TRL", format=".2f"),
    Column(key="peak_mib", heading="peak, MiB"),
    Column(key="of_peak_mib", heading="of TRL", format=".2f"),
    Column(key="grown_mib", heading="grown, MiB"),
    Column(key="of_grown_mib", heading="of TRL", format=".2f"),
    Column(key="apart", heading="losses apart", format=".1e"),
    Column(key="losses", heading="loss, first to last step"),
    Column(key="rewards", heading="mean reward by quarters of the run"),
]
COMMON = (*TRAINED_ALIKE, "precision=fp32", *QUIET)


def make_bases(folder: Path, wanted: set[str]) -> None:
    """Train the models that methods start from, and export them: one from scratch, and one that adds numbers.

    `ragged` has 2 million parameters that have taken no step worth the name, `sums` has 0.36 million and is right about
    half the time.
    """
    quiet = ("tracking=none", "tracking.progress=false")
    if "ragged" in wanted:
        sizes = ("model.hidden_size=192", "model.intermediate_size=512", "model.num_layers=4", "model.num_heads=4")
        small = ("data.form=text", "data.num_rows=400", "data.seq_len=512", "hparams.max_steps=1", "hparams.lr=1e-9")
        call("-m", "foundry", "data=arithmetic", *small, *sizes, *quiet, f"hydra.run.dir={folder / 'ragged'}")
    if "sums" in wanted:
        texts = folder / "texts"
        call("-m", "foundry", "experiment=pretrain_arithmetic", *quiet, f"hydra.run.dir={texts}")
        base = ("experiment=sft_arithmetic", f"model.path={texts}", f"hydra.run.dir={folder / 'sums'}")
        call("-m", "foundry", *base, *quiet)
    for name in wanted:
        call("-m", "foundry.export", f"run={folder / name}", f"out={folder / f'{name}_hf'}")


def write_rows(folder: Path, count: int) -> None:
    """Ragged conversations, half of them below 65 tokens and a few above 350; sums as pairs and as prompts."""
    from foundry.data.arithmetic import Sum

    generator = random.Random(0)
    rows = dict[str, list[dict[str, str]]](sft=[], dpo=[], grpo=[])
    for number in range(count):
        length = min(400, max(4, int(generator.lognormvariate(3.6, 1.0))))
        words = " ".join(str(generator.randrange(100)) for _ in range(length // 3 + 1))
        rows["sft"].append({"prompt": f"Count to {number}", "completion": words[:length]})
        low = generator.choice((10, 100))
        one = Sum(generator.randrange(low, 10 * low), generator.randrange(low, 10 * low))
        wrong = one.worked(number % (len(str(one.a)) - 1))
        rows["dpo"].append({"prompt": one.question, "chosen": one.worked(), "rejected": wrong})
        rows["grpo"].append({"prompt": one.question, "answer": one.worked()})
    for name, own in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        (folder / f"{name}_held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own[:2]))


def runs_of(folder: Path, name: str, steps: int, seed: int, only: Sequence[str]) -> dict[str, Path]:
    """The job files of one method and seed by side, TRL's first."""
    method = METHODS[name]
    model = folder / method.base
    overrides = [
        f"data.path={folder / name}.jsonl",
        f"data.validation_path={folder / name}_held_out.jsonl",
        f"data.cache_dir={folder / 'cache'}",
        f"hparams.lr={method.lr}",
        f"hparams.max_steps={steps}",
        f"hparams.seed={seed}",
        f"hparams.global_batch_size={method.batch_size}",
        f"hparams.per_gpu_batch_size={method.per_gpu_batch_size}",
    ]
    own = ("model=base", f"model.path={model}")
    # Not model=base: the order of rows depends on the special tokens that a folder names, and a run does not.
    hf = ("model=hf", f"model.path={model}_hf", f"data.tokenizer={model / 'tokenizer.json'}")
    sides: dict[str, tuple[str, ...]] = {"TRL": own, "foundry": own, "foundry, model=hf": hf}
    if method.packs:
        packed = "data.packing=true"
        sides |= {"foundry, packed": (*own, packed), "foundry, model=hf, packed": (*hf, packed)}
    group = method.job.get("num_generations")
    order = folder / f"{name}_{seed}_order"
    jobs = dict[str, Path]()
    for side, model_overrides in {"order": own, **sides}.items():
        own_folder = order if side == "order" else folder / f"{name}_{seed}_{side.replace(', ', '_')}"
        own_folder.mkdir()
        jobs[side] = own_folder / "job.json"
        job = {
            **method.job,
            "method": name,
            "folder": str(own_folder),
            "steps": steps,
            "seed": seed,
            "num_warmup": NUM_WARMUP,
            "lr": method.lr,
            "batch_size": method.batch_size,
            "per_gpu_batch_size": method.per_gpu_batch_size,
            "read_each_step": method.batch_size // (group or 1),
            "num_answers": method.batch_size if group else None,
            "model": f"{model}_hf",
            "rows": f"{folder / name}.jsonl",
            "order": str(order / "order.json"),
            "only_order": side == "order",
            "overrides": [*model_overrides, *method.overrides, *COMMON, *overrides],
        }
        jobs[side].write_text(json.dumps(job))
    call(HERE / "finetuning_trl_own.py", jobs.pop("order"))
    return {side: file for side, file in jobs.items() if side == "TRL" or not only or side in only}


def measure(side: str, job: Path) -> dict[str, Any]:
    """Run it, and what it wrote."""
    call(HERE / ("finetuning_trl_theirs.py" if side == "TRL" else "finetuning_trl_own.py"), job)
    measured: dict[str, Any] = json.loads((job.parent / "measured.json").read_text())
    return measured


def rows_of(name: str, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """What the runs of one method came to, by side, a run for each seed; TRL's side is the first."""
    theirs, rows = found["TRL"], list[Row]()
    for side, own in found.items():
        speed, others = speeds(own, "cpu_seconds"), speeds(theirs, "cpu_seconds")
        values: dict[str, Values] = {"speed": speed, "of_speed": [fmean(speed) / fmean(others)]}
        for key in ("peak_mib", "grown_mib"):
            size, other = ([one[key] for one in runs] for runs in (own, theirs))
            values |= {key: size, f"of_{key}": [fmean(size) / fmean(other)]}
        if name == "grpo":
            values["rewards"] = "; ".join(" ".join(f"{mean:.3f}" for mean in quarters(one)) for one in own)
        else:
            pairs = [zip(a["losses"], b["losses"], strict=True) for a, b in zip(own, theirs, strict=True)]
            values["apart"] = [max(abs(a - b) / abs(b) for both in pairs for a, b in both)]
            values["losses"] = f"{own[0]['losses'][0]:.4f} to {own[0]['losses'][-1]:.4f}"
        rows.append(Row(case=name.upper(), side=side, values=values))
    return rows


def quarters(run: dict[str, Any]) -> list[float]:
    """The mean reward of each quarter of a run."""
    rewards = run["rewards"]
    cuts = [len(rewards) * part // 4 for part in range(5)]
    return [fmean(rewards[start:end]) for start, end in pairwise(cuts)]


def main() -> None:
    """Compare."""
    made = parser(__doc__)
    made.add_argument("methods", nargs="*", metavar="sft|dpo|grpo", default=list(METHODS))
    made.add_argument("--steps", type=int, default=50)
    made.add_argument("--grpo-steps", type=int, help="another number of steps for GRPO")
    made.add_argument("--seeds", type=int, nargs="+", default=[42], help="of GRPO; the others take the first")
    made.add_argument("--at-once", type=int, default=1, choices=(1, 2))
    made.add_argument("--only", nargs="+", default=[], help="of foundry's sides, such as 'foundry, packed'")
    made.add_argument("--bases", type=Path, help="folder where bases are, or are kept for the next time")
    options = made.parse_args()
    names = options.methods
    steps_of = dict.fromkeys(METHODS, options.steps) | ({"grpo": options.grpo_steps} if options.grpo_steps else {})
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bases = folder if options.bases is None else options.bases.absolute()
        bases.mkdir(exist_ok=True)
        wanted = {METHODS[name].base for name in names}
        make_bases(bases, {name for name in wanted if not (bases / f"{name}_hf").exists()})
        for name in wanted if bases != folder else ():
            for suffix in ("", "_hf"):
                (folder / f"{name}{suffix}").symlink_to(bases / f"{name}{suffix}")
        write_rows(folder, max(steps_of.values()) * 32)
        for name in names:
            found: dict[str, list[dict[str, Any]]] = {}
            for seed in options.seeds if name == "grpo" else options.seeds[:1]:
                jobs = runs_of(folder, name, steps_of[name], seed, options.only)
                with ThreadPoolExecutor(options.at_once) as pool:
                    for side, measured in zip(jobs, pool.map(measure, jobs, jobs.values()), strict=True):
                        found.setdefault(side, []).append(measured)
            rows += rows_of(name, found)
    fastest = {
        name: max((row for row in rows if row.case == name.upper() and row.side != "TRL"), key=_times_trl)
        for name in names
    }
    headlines = [
        Headline(
            what=f"{name.upper()}, useful tokens per second",
            foundry=f"{_times_trl(row):.2f} times TRL's ({row.side})",
            beside="TRL",
        )
        for name, row in fastest.items()
    ]
    finish(options, case="method", columns=COLUMNS, rows=rows, chart="speed", headlines=headlines)


def _times_trl(row: Row) -> float:
    ratio = row.values["of_speed"]
    assert ratio is not None
    return float(ratio[0])


if __name__ == "__main__":
    main()
