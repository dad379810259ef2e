"""Held-out bits per byte after three minutes of training on two cores: an open record of recipes.

    python benchmarks/three_minutes.py [--seeds 5] [--seconds 180] [--overrides OVERRIDE ...] [--keep DIR]
    python benchmarks/three_minutes.py --nanogpt DIR --text FILE

Every side trains on the data of `python -m foundry`, or on a text file, with the same tokenizer and held-out split. A
run may take `--seconds` from the start of its process to the end of its last optimizer step. Two short runs of each
side measure its start and its time for a step. They determine the number of steps, and the schedule ends with the last
step. A run that ends too late is repeated with fewer steps, which the later runs of the side have too. The learning
rate of the peers is the best of `--rates` with HF Trainer, on a seed that is not measured.
"""

import argparse
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comparison import Measured, in_turn, installed, run_job
from default_recipe import mean_and_interval
from records import Column, Headline, Row, Values, finish, parser
from scipy.stats import ttest_ind  # type: ignore[import-untyped]

SCRIPT, SEARCH_SEED = "three_minutes_sides.py", 1000
CALIBRATION = (5, 25)
"""Numbers of steps of the two short runs that determine the start and the time for a step."""
CALIBRATION_ROWS = 8
"""Held-out rows of these runs."""
MARGIN = 0.97
"""Fraction of the seconds that a run aims at, so that most runs end in time."""
RATES = (3e-4, 1e-3, 3e-3)
PEERS = ("hf", "lightning")
NAMES = {"hf": "HF Trainer", "lightning": "Lightning", "nanogpt": "nanoGPT, its CPU recipe"}
SMOKE = (
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=1"),
    *("model.num_heads=2", "model.num_kv_heads=2", "data.seq_len=64"),
)


@dataclass(frozen=True)
class Entry:
    """A recipe in the record.

    Attributes:
        side: side of three_minutes_sides.py.
        overrides: configuration of foundry, as overrides of the default run.
        lr: learning rate of a peer; None if the side has its own.
    """

    side: str
    overrides: tuple[str, ...] = ()
    lr: float | None = None

    @property
    def name(self) -> str:
        """Name in the table."""
        return ", ".join([NAMES.get(self.side, self.side), *(f"`{word}`" for word in self.overrides)])


@dataclass(frozen=True)
class Track:
    """Conditions that all entries share.

    Attributes:
        folder: folder of the runs; a run that has finished there is not repeated.
        seconds: wall time of a run.
        overrides: overrides of all sides, such as another text.
        nanogpt: folder of a clone of nanoGPT, or None.
        max_steps: limit on the steps of a run, for tests; None for no limit.
        evaluated_rows: held-out rows of each run, for tests; None for all.
        threads: threads of a run.
    """

    folder: Path
    seconds: float
    overrides: tuple[str, ...]
    nanogpt: str | None
    max_steps: int | None = None
    evaluated_rows: int | None = None
    threads: int = 2

    def prepare(self) -> Measured:
        """Tokenize the text, before any clock starts; see `three_minutes_sides.prepare`."""
        return self.run(Entry("prepare"), 1)

    def run(self, entry: Entry, steps: int, seed: int = SEARCH_SEED, *, is_calibration: bool = False) -> Measured:
        """Train an entry and return seconds, tokens, and the held-out loss (of few rows if it is a calibration)."""
        kind = "calibration" if is_calibration else f"seed {seed}"
        name = re.sub(r"\W+", "_", f"{entry.side} {' '.join(entry.overrides)} {entry.lr} {steps} {kind}")
        measured = self.folder / name / "measured.json"
        if measured.exists():
            kept: Measured = json.loads(measured.read_text())
            return kept
        job: dict[str, Any] = {
            "measured": str(measured),
            "data": str(self.folder / "data"),
            "prepared": {} if entry.side == "prepare" else self.prepare(),
            "overrides": [*self.overrides, *entry.overrides],
            "steps": steps,
            "seed": seed,
            "lr": entry.lr,
            "nanogpt": self.nanogpt,
            "evaluated_rows": CALIBRATION_ROWS if is_calibration else self.evaluated_rows,
            "begin": time.time(),
        }
        result = run_job(SCRIPT, entry.side, job=job, threads=self.threads)
        if "loss" in result:
            print(f"{name}: {result['seconds']:.1f} s, {result['loss']:.4f} nats per token", flush=True)
        return result

    def choose_steps(self, entry: Entry) -> int:
        """Return the number of steps that take `MARGIN` of the seconds, by two short runs."""
        first, last = (self.run(entry, steps, is_calibration=True)["seconds"] for steps in CALIBRATION)
        seconds_per_step = max(1e-4, (last - first) / (CALIBRATION[1] - CALIBRATION[0]))
        steps = max(1, CALIBRATION[1] + int((MARGIN * self.seconds - last) / seconds_per_step))
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def run_in_time(self, entry: Entry, steps: int, seed: int) -> Measured:
        """Train an entry, again with fewer steps as long as it takes more than the seconds.

        Raises:
            RuntimeError: a single step takes too long.
        """
        while (result := self.run(entry, steps, seed))["seconds"] > self.seconds:
            if steps == 1:
                raise RuntimeError(f"{entry.name} needs {result['seconds']:.1f} s for a step; increase --seconds")
            steps = max(1, int(steps * MARGIN * self.seconds / result["seconds"]))
        return {**result, "steps": steps}


def search_rate(
    track: Track, side: str, rates: Sequence[float], bits_per_byte: Callable[[float], float]
) -> tuple[float, int, str]:
    """Return the best of the learning rates of a peer, the last number of steps, and a sentence about the search."""
    steps, found = track.choose_steps(Entry(side, lr=rates[0])), dict[float, float]()
    for rate in rates:
        result = track.run_in_time(Entry(side, lr=rate), steps, SEARCH_SEED)
        steps, found[rate] = result["steps"], result["loss"]
    best = min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)
    listed = ", ".join(f"{rate:g}: {bits_per_byte(loss):.4f}" for rate, loss in found.items())
    note = f"Bits per byte of {NAMES[side]} by learning rate, seed {SEARCH_SEED}: {listed}."
    if len(rates) > 1 and best in (min(rates), max(rates)):
        note += " The best is at an end of the list, so a rate beyond it may be better."
    return best, steps, note


def difference(values: Sequence[float], reference: Sequence[float]) -> str:
    """Return the difference of the means with its 95 % interval by Welch's t-test; empty with a single value."""
    if min(len(values), len(reference)) < 2:
        return ""
    low, high = ttest_ind(values, reference, equal_var=False).confidence_interval(0.95)
    return f"{(low + high) / 2:+.4f} ± {(high - low) / 2:.4f}"


def main() -> None:
    """Search the rate of the peers, measure all sides over the seeds, and write the record."""
    cli = parser(__doc__)
    cli.add_argument("--seeds", type=int, default=5, help="measured seeds of each side")
    cli.add_argument("--seconds", type=float, default=180.0, help="wall time of a run")
    cli.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="learning rates to choose from for the peers"
    )
    cli.add_argument("--sides", nargs="+", choices=PEERS, default=PEERS, metavar="SIDE", help=f"of {', '.join(PEERS)}")
    cli.add_argument("--overrides", nargs="+", default=(), help="configuration of a further entry of foundry")
    cli.add_argument("--text", type=Path, help="text file to train on instead of the default data")
    cli.add_argument("--nanogpt", type=Path, help="clone of github.com/karpathy/nanoGPT, whose CPU recipe is a side")
    cli.add_argument("--keep", type=Path, help="folder of the runs; finished runs in it are not repeated")
    options: argparse.Namespace = cli.parse_args()
    data = [] if options.text is None else ["data=text", f"data.path='{options.text.resolve()}'"]
    nanogpt = None if options.nanogpt is None else str(options.nanogpt.resolve())
    entries = [Entry("foundry"), *([Entry("foundry", tuple(options.overrides))] if options.overrides else [])]
    notes = list[str]()
    with tempfile.TemporaryDirectory(prefix="three-minutes-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        if not options.smoke:
            os.environ["FOUNDRY_CACHE"] = str(folder / "cache")
        track = Track(folder, options.seconds, (*data, *(SMOKE if options.smoke else ())), nanogpt)
        if options.smoke:
            track = replace(track, seconds=600.0, max_steps=CALIBRATION[1], evaluated_rows=64, threads=1)
        prepared = track.prepare()

        def bits_per_byte(loss: float) -> float:
            return loss * float(prepared["tokens"]) / float(prepared["bytes"]) / math.log(2)

        steps = dict[Entry, int]()
        if peers := installed(options.sides):
            rate, last_steps, note = search_rate(track, peers[0], options.rates, bits_per_byte)
            entries += [Entry(side, lr=rate) for side in peers]
            steps[Entry(peers[0], lr=rate)] = last_steps
            notes.append(note)
        if nanogpt is not None:
            entries.append(Entry("nanogpt"))
        steps |= {entry: track.choose_steps(entry) for entry in entries if entry not in steps}
        by_name = {entry.name: entry for entry in entries}

        def measure(name: str, seed: int) -> Measured:
            entry = by_name[name]
            result = track.run_in_time(entry, steps[entry], seed)
            steps[entry] = result["steps"]
            return result

        runs = in_turn([*by_name], options.seeds, measure)
    bits = {name: [bits_per_byte(run["loss"]) for run in found] for name, found in runs.items()}
    rows = list[Row]()
    for name, found in runs.items():
        values: dict[str, Values] = {key: [run[key] for run in found] for key in ("seconds", "steps", "tokens")}
        values |= {"bits": mean_and_interval(bits[name]), "each": bits[name]}
        values["beside"] = difference(bits[name], bits["foundry"]) if name != "foundry" else None
        rows.append(Row(side=name, values=values))
    others = sorted((name for name in bits if name != "foundry"), key=lambda name: sum(bits[name]))
    finish(
        options,
        **({} if options.text is None else {"name": "three_minutes_text"}),
        side="recipe",
        columns=[
            Column(key="bits", heading="bits per byte, mean ± 95 % interval"),
            Column(key="each", heading="median (range)", format=".4f", spread=True),
            Column(key="beside", heading="difference from the first row ± 95 % interval"),
            Column(key="steps", heading="steps"),
            Column(key="tokens", heading="tokens"),
            Column(key="seconds", heading="seconds", format=".1f", spread=True),
        ],
        rows=rows,
        notes=notes,
        headlines=[
            Headline(
                what=f"Held-out bits per byte after {options.seconds:g} s on two cores",
                foundry=mean_and_interval(bits["foundry"]),
                beside=f"{mean_and_interval(bits[others[0]])} ({others[0]})" if others else "no peer",
            )
        ],
    )


if __name__ == "__main__":
    main()
