"""SFT, DPO and GRPO beside TRL's trainers: same weights, rows and hyperparameters, each run in a new process.

    python -m pip install -e ".[bench]"
    python benchmarks/finetuning_trl.py [sft] [dpo] [grpo] [--steps 50] [--seeds 42 1] [--only SIDE] [--bases FOLDER]

TRL runs with its defaults and with its settings for speed; foundry runs with its own decoder and with transformers'
(model=hf). foundry's side is `run()` of a composed configuration. The sides run in turn, a round for each seed, on one
thread. For each side are shown:

- useful tokens per second of CPU time: tokens without padding (GRPO: generated tokens), over all steps from the first
  one, and the pass of the reference model if the run makes one before its first step;
- CPU seconds of the whole process, which include imports and the preparation of data;
- the largest resident set, and its growth from before the first step;
- the largest relative difference of a step's loss from TRL's, if both take the same samples in the same order.
"""

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from comparison import HERE, LLAMA, QUIET, TRAINED_ALIKE, Measured, call, in_turn, losses_apart, speeds
from records import Column, Headline, Row, Values, finish, parser

SEQ_LEN = 512
"""Maximum tokens of a conversation, and the length of packed rows on both sides."""


@dataclass(frozen=True)
class Method:
    """Settings of a fine-tuning method on both sides.

    Attributes:
        base: initial weights, see `make_bases`.
        lr: constant learning rate.
        batch_size: samples of a step: conversations, pairs or completions.
        per_gpu_batch_size: samples of a microbatch, except for the sides of `AT_A_TIME`.
        overrides: overrides of foundry's sides.
        trl: TRL's sides by name, each with the settings that differ from `finetuning_trl_theirs.settings`.
        job: further entries of the job file.
        packs: whether foundry also runs with `data.packing=true`.
    """

    base: str
    lr: float
    batch_size: int
    per_gpu_batch_size: int
    overrides: tuple[str, ...]
    trl: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"TRL": {}})
    job: Mapping[str, Any] = field(default_factory=dict)
    packs: bool = False

    @property
    def read_each_step(self) -> int:
        """Dataset rows that a step reads; with groups of completions one row gives several samples."""
        return self.batch_size // int(self.job.get("num_generations", 1))


PADDING_FREE, BY_LENGTH, PACKED = "TRL, padding_free", "TRL, group_by_length", "TRL, packing"
ANOTHER_ORDER = {BY_LENGTH, PACKED}
"""Sides with other samples per step than TRL's default, so that their losses cannot be compared."""

TRL_SFT: dict[str, dict[str, Any]] = {
    "TRL": {},
    PADDING_FREE: {"padding_free": True},
    BY_LENGTH: {"train_sampling_strategy": "group_by_length"},
    # TRL counts a packed row as one sample, so this side trains for one epoch, in steps of 8 packed rows.
    PACKED: {
        "packing": True,
        "max_length": SEQ_LEN,
        "gradient_accumulation_steps": 8,
        "max_steps": -1,
        "num_train_epochs": 1,
    },
}
TRL_DPO: dict[str, dict[str, Any]] = {
    "TRL": {},
    "TRL, precompute_ref_log_probs": {"precompute_ref_log_probs": True},
}

METHODS = {
    "sft": Method(
        "ragged", 3e-4, 32, 8, ("data=chats", "objective=sft", f"data.seq_len={SEQ_LEN}"), TRL_SFT, packs=True
    ),
    "dpo": Method(
        "sums",
        2e-5,
        16,
        16,
        ("data=preferences", "objective=dpo", "objective.ref_policy_kl_penalty=0.1", "data.seq_len=160"),
        TRL_DPO,
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
        job={"num_generations": 8, "max_new_tokens": 48, "beta": 0.0},
    ),
}
AT_A_TIME = {
    PADDING_FREE: 2,
    BY_LENGTH: 2,
    PACKED: 1,
    "foundry, packed": 2,
    "foundry, model=hf, packed": 2,
}
"""Samples or packed rows of a microbatch, for sides that are fastest with fewer than `Method.per_gpu_batch_size`."""

COLUMNS = [
    Column(key="at_a_time", heading="at a time", format=".0f"),
    Column(key="speed", heading="useful tokens/s of CPU time", spread=True),
    Column(key="of_speed", heading="of the fastest TRL", format=".2f"),
    Column(key="process", heading="whole process, CPU s", format=".0f"),
    Column(key="peak_mib", heading="peak, MiB"),
    Column(key="of_peak_mib", heading="of the least TRL", format=".2f"),
    Column(key="grown_mib", heading="grown, MiB"),
    Column(key="of_grown_mib", heading="of the least TRL", format=".2f"),
    Column(key="apart", heading="losses apart", format=".1e"),
]
TITLES = {
    "SFT": "SFT of ragged conversations",
    "DPO": "DPO with the pass of the reference",
    "GRPO": "GRPO",
}
"""Names of the methods in the short table."""

COMMON = (*TRAINED_ALIKE, "precision=fp32", *QUIET)


def make_bases(folder: Path, names: set[str], more: Sequence[str] = ()) -> None:
    """Train and export the initial models.

    Args:
        folder: folder for run directories and exports.
        names: `ragged` has 2 million parameters, after one step at a learning rate near 0; `sums` has 0.36 million and
            computes about 0.8 of its sums correctly.
        more: overrides for the training of `sums`.
    """
    quiet = ("tracking=none", "tracking.progress=false")
    if "ragged" in names:
        sizes = ("model.hidden_size=192", "model.intermediate_size=512", "model.num_layers=4", "model.num_heads=4")
        small = ("data.form=text", "data.num_rows=400", "data.seq_len=512", "hparams.max_steps=1", "hparams.lr=1e-9")
        call("-m", "foundry", "data=arithmetic", *LLAMA, *small, *sizes, *quiet, f"hydra.run.dir={folder / 'ragged'}")
    if "sums" in names:
        texts = folder / "texts"
        call("-m", "foundry", "experiment=pretrain_arithmetic", *LLAMA, *more, *quiet, f"hydra.run.dir={texts}")
        base = ("experiment=sft_arithmetic", f"model.path={texts}", f"hydra.run.dir={folder / 'sums'}")
        call("-m", "foundry", *base, *more, *quiet)
    for name in names:
        call("-m", "foundry.export", f"run={folder / name}", f"out={folder / f'{name}_hf'}")


def write_rows(folder: Path, counts: Mapping[str, int]) -> None:
    """Write ragged conversations (half of them below 65 tokens, a few above 350), pairs of sums, and prompts.

    Args:
        folder: folder for one JSONL file per method and one file of two held-out rows.
        counts: number of rows by method: as many as training reads, so that a pass over the dataset takes no longer.
    """
    from foundry.data.arithmetic import Sum

    generator = random.Random(0)
    rows = dict[str, list[dict[str, str]]](sft=[], dpo=[], grpo=[])
    for number in range(max(counts.values())):
        length = min(400, max(4, int(generator.lognormvariate(3.6, 1.0))))
        words = " ".join(str(generator.randrange(100)) for _ in range(length // 3 + 1))
        rows["sft"].append({"prompt": f"Count to {number}", "completion": words[:length]})
        low = generator.choice((10, 100))
        sum_ = Sum(generator.randrange(low, 10 * low), generator.randrange(low, 10 * low))
        wrong = sum_.solution(number % (len(str(sum_.a)) - 1))
        rows["dpo"].append({"prompt": sum_.question, "chosen": sum_.solution(), "rejected": wrong})
        rows["grpo"].append({"prompt": sum_.question, "answer": sum_.solution()})
    for name, count in counts.items():
        method_rows = rows[name][:count]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in method_rows))
        (folder / f"{name}_held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in method_rows[:2]))


def sides_of(folder: Path, name: str) -> dict[str, tuple[str, ...]]:
    """Return the overrides that select foundry's model, by side; TRL's sides, which ignore them, come first."""
    method = METHODS[name]
    model = folder / method.base
    base = ("model=base", f"model.path={model}")
    # The run's tokenizer, not the exported folder's: only the latter declares special tokens, which change the order.
    hf = ("model=hf", f"model.path={model}_hf", f"data.tokenizer={model / 'tokenizer.json'}")
    sides = dict.fromkeys(method.trl, base) | {"foundry": base, "foundry, model=hf": hf}
    if method.packs:
        packed = "data.packing=true"
        sides |= {"foundry, packed": (*base, packed), "foundry, model=hf, packed": (*hf, packed)}
    return sides


def measure(folder: Path, name: str, side: str, model: Sequence[str], steps: int, seed: int) -> Measured:
    """Run a side in a new process and return its measurements; the side `order` only writes rows in foundry's order."""
    at_a_time = AT_A_TIME.get(side, METHODS[name].per_gpu_batch_size)
    method, own_folder = METHODS[name], folder / f"{name}_{seed}_{side.replace(', ', '_')}"
    own_folder.mkdir()
    overrides = [
        f"data.path={folder / name}.jsonl",
        f"data.validation_path={folder / name}_held_out.jsonl",
        f"data.cache_dir={folder / 'cache'}",
        f"hparams.lr={method.lr}",
        f"hparams.max_steps={steps}",
        f"hparams.seed={seed}",
        f"hparams.global_batch_size={method.batch_size}",
        f"hparams.per_gpu_batch_size={at_a_time}",
    ]
    job = {
        **method.job,
        "method": name,
        "folder": str(own_folder),
        "steps": steps,
        "seed": seed,
        "lr": method.lr,
        "batch_size": method.batch_size,
        "per_gpu_batch_size": at_a_time,
        "read_each_step": method.read_each_step,
        "num_answers": method.batch_size if "num_generations" in method.job else None,
        "model": f"{folder / method.base}_hf",
        "rows": f"{folder / name}.jsonl",
        "order": str(folder / f"{name}_{seed}_order" / "order.json"),
        "only_order": side == "order",
        "overrides": [*model, *method.overrides, *COMMON, *overrides],
        "trl": method.trl.get(side, {}),
    }
    file, measured = own_folder / "job.json", own_folder / "measured.json"
    file.write_text(json.dumps(job))
    call(HERE / ("finetuning_trl_theirs.py" if side in method.trl else "finetuning_trl_own.py"), file)
    return json.loads(measured.read_text()) if measured.exists() else {}


def compare(
    folder: Path, name: str, steps: int, seeds: Sequence[int], only: Sequence[str]
) -> dict[str, list[Measured]]:
    """Measure the sides of a method in turn, a round for each seed.

    Args:
        folder: folder with the initial models and the rows.
        name: name of the method.
        steps: number of steps of each run.
        seeds: seeds of the order of rows and of sampling.
        only: sides to run in addition to TRL's default; empty for all.
    """
    sides = sides_of(folder, name)
    selected_sides = [side for side in sides if side == "TRL" or not only or side in only]
    for seed in seeds:
        measure(folder, name, "order", sides["foundry"], steps, seed)
    return in_turn(
        selected_sides, len(seeds), lambda side, number: measure(folder, name, side, sides[side], steps, seeds[number])
    )


def rows_of(name: str, measurements: Mapping[str, Sequence[Measured]]) -> list[Row]:
    """Return the rows of a method's table: speed and memory of each side, compared with the best of TRL's sides.

    Raises:
        RuntimeError: a side read other samples than TRL, or computed other losses from the same ones.
    """
    peers, apart = METHODS[name].trl.keys() & measurements.keys(), dict[str, float]()
    speed = {side: speeds(runs, "cpu_seconds") for side, runs in measurements.items()}
    fastest = max(median(speed[side]) for side in peers)
    if name != "grpo":
        if len({tuple(run["tokens"] for run in runs) for runs in measurements.values()}) > 1:
            raise RuntimeError(f"the sides of {name} have counted different numbers of useful tokens")
        rounds = range(len(measurements["TRL"]))
        same_order = {side: runs for side, runs in measurements.items() if side not in ANOTHER_ORDER}
        each = [losses_apart({side: [runs[number]] for side, runs in same_order.items()}) for number in rounds]
        apart = {side: max(item[side] for item in each) for side in same_order}
    rows = list[Row]()
    for side, runs in measurements.items():
        values: dict[str, Values] = {"speed": speed[side], "of_speed": [median(speed[side]) / fastest]}
        values["at_a_time"] = [AT_A_TIME.get(side, METHODS[name].per_gpu_batch_size)]
        values["process"] = [run["process_cpu_seconds"] for run in runs]
        for key in ("peak_mib", "grown_mib"):
            least = min(median(run[key] for run in measurements[peer]) for peer in peers)
            size = [run[key] for run in runs]
            values |= {key: size, f"of_{key}": [median(size) / least]}
        if side in ANOTHER_ORDER:
            values["apart"] = "another order"
        elif side != "TRL" and apart:
            values["apart"] = [apart[side]]
        rows.append(Row(case=name.upper(), side=side, values=values))
    return rows


def note_of(name: str, measurements: Mapping[str, Sequence[Measured]]) -> str:
    """Return a sentence about the runs: TRL's losses with the first seed, or rewards of GRPO by quarters of the run."""
    if name == "grpo":
        courses = [
            f"{side} {'; '.join(' '.join(f'{mean:.3f}' for mean in quarters(run)) for run in runs)}"
            for side, runs in measurements.items()
        ]
        return f"GRPO: mean reward by quarters of the run, a run for each seed: {', '.join(courses)}."
    losses = measurements["TRL"][0]["losses"]
    prepared = {side: median(run["prepared_cpu_seconds"] for run in runs) for side, runs in measurements.items()}
    passes = ", ".join(f"{side} {seconds:.1f} s" for side, seconds in prepared.items() if seconds > 0.05)
    course = f"{name.upper()}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps of TRL"
    return f"{course}; the reference's pass over all pairs before the first step: {passes}." if passes else f"{course}."


def quarters(run: Mapping[str, Any]) -> list[float]:
    """Return the mean reward of each quarter of a run; fewer means if the run has fewer than four steps."""
    rewards = run["rewards"]
    cuts = [len(rewards) * part // 4 for part in range(5)]
    return [fmean(rewards[start:end]) for start, end in pairwise(cuts) if end > start]


def headline_of(rows: Sequence[Row]) -> Headline:
    """Return a method's line of the short table: the fastest side of each of foundry's models, and up to three of TRL.

    TRL's are the fastest side, the fastest with samples in foundry's order, and the default.
    """

    def tokens(row: Row) -> float:
        speed = row.values["speed"]
        assert speed is not None
        assert not isinstance(speed, str)
        return median(speed)

    peers = [row for row in rows if row.side.startswith("TRL")]
    same_order = [row for row in peers if row.side not in ANOTHER_ORDER]
    hf = [row for row in rows if row.side.startswith("foundry, model=hf")]
    native = [row for row in rows if row.side.startswith("foundry") and row not in hf]
    plain = [row for row in peers if row.side == "TRL"]
    fastest = {max(group, key=tokens).side: max(map(tokens, group)) for group in (native, hf, peers, same_order, plain)}

    def listed(name: str) -> str:
        """Return the speeds of foundry's or TRL's sides in `fastest`, each with the settings of the side."""
        words = {"foundry": "own decoder", "TRL": "default"} | {
            side: f"{side}, another order" for side in ANOTHER_ORDER
        }
        labels = {side: words.get(side, side) for side in fastest if side.startswith(name)}
        return ", ".join(f"{fastest[side]:,.0f} ({each.removeprefix(f'{name}, ')})" for side, each in labels.items())

    return Headline(
        what=f"{TITLES[rows[0].case]}, useful tokens per CPU-second",
        foundry=listed("foundry"),
        beside=f"TRL: {listed('TRL')}",
    )


def main() -> None:
    """Compare the sides."""
    cli = parser(__doc__)
    cli.add_argument("methods", nargs="*", metavar="sft|dpo|grpo", default=list(METHODS))
    cli.add_argument("--steps", type=int, default=50)
    cli.add_argument("--sft-steps", type=int, help="another number of steps for SFT")
    cli.add_argument("--grpo-steps", type=int, help="another number of steps for GRPO")
    cli.add_argument("--seeds", type=int, nargs="+", default=[42, 1], help="a round for each")
    cli.add_argument(
        "--only", nargs="+", default=[], help="sides in addition to TRL's default, such as 'foundry, packed'"
    )
    cli.add_argument("--bases", type=Path, help="folder of bases: missing ones are trained and kept there")
    options = cli.parse_args()
    names, seeds = options.methods, options.seeds[:1] if options.smoke else options.seeds
    steps_of = dict.fromkeys(METHODS, 2 if options.smoke else options.steps)
    for name in () if options.smoke else ("sft", "grpo"):
        steps_of[name] = getattr(options, f"{name}_steps") or steps_of[name]
    rows, notes, headlines = list[Row](), list[str](), list[Headline]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bases = folder if options.bases is None else options.bases.absolute()
        bases.mkdir(exist_ok=True)
        bases_of_methods = {METHODS[name].base for name in names}
        missing = {name for name in bases_of_methods if not (bases / f"{name}_hf").exists()}
        make_bases(bases, missing, ("debug=fast",) if options.smoke else ())
        for name in bases_of_methods if bases != folder else ():
            for suffix in ("", "_hf"):
                (folder / f"{name}{suffix}").symlink_to(bases / f"{name}{suffix}")
        write_rows(folder, {name: steps_of[name] * METHODS[name].read_each_step for name in names})
        for name in names:
            measurements = compare(folder, name, steps_of[name], seeds, options.only)
            method_rows = rows_of(name, measurements)
            rows += method_rows
            notes.append(note_of(name, measurements))
            headlines += [] if options.only else [headline_of(method_rows)]
    finish(options, case="method", columns=COLUMNS, rows=rows, chart="speed", notes=notes, headlines=headlines)


if __name__ == "__main__":
    main()
