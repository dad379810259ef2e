"""Kill training runs of several libraries, continue them as each library documents it, and compare the results.

    python -m pip install -e '.[bench]'
    python benchmarks/resume_fidelity.py [--kills 5] [--sides hf trl_sft ...] [--seed 0]

All sides train the same small Llama with dropout on the same rows for two epochs, on one rank. A run is killed with all
its processes by SIGKILL, at a random step or inside a save. It is continued twice from the same files: on one rank, and
on two ranks, which torchrun starts and which communicate by gloo. Each result is compared with an undisturbed run on
one rank. The moments of the kills are the same on all sides. For each side are shown:

- the kills after which the documented call continued the run to its last step; if it fails, the newest checkpoint is
  deleted by hand and the call repeated, and a note has the result;
- the continued runs whose final weights have the same bits, and the largest relative L2 difference of any tensor;
- samples repeated and skipped in an epoch, counted by their ids at the token embedding. The first training of a lost
  step does not count;
- lost steps: finished before the kill and trained again;
- seconds from the start of the process to the end of its first step.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comparison import HERE, LLAMA, QUIET, call, default_threads
from kills import MARK, Life
from records import Column, Headline, Row, Values, finish, parser

SCRIPT = HERE / "resume_fidelity_sides.py"
OWN, OWN_HF = "foundry", "foundry_hf"
RANKS = (1, 2)
TIMEOUT = 600.0
"""Seconds after which a run is ended as hung."""


@dataclass(frozen=True)
class Side:
    """A library that is compared.

    Attributes:
        title: name in the table.
        packages: required packages in addition to torch and transformers.
        settings: its checkpoints and its call to continue, for the notes.
        saves: folder of checkpoints in the side's folder.
    """

    title: str
    packages: tuple[str, ...]
    settings: str
    saves: str = ""


TRAINER = "`full_determinism=True`, `save_strategy=steps`, `resume_from_checkpoint=True`"
SIDES = {
    OWN: Side(
        "foundry", (), "its own decoder, `objective=sft`, `checkpoint.interval`, the same command", "checkpoints"
    ),
    OWN_HF: Side("foundry, model=hf", (), "as foundry, with the Llama of transformers", "checkpoints"),
    "hf": Side("HF Trainer", ("accelerate",), TRAINER),
    "lightning": Side(
        "Lightning Trainer",
        ("lightning", "torchdata"),
        "`ModelCheckpoint(every_n_train_steps, save_top_k=-1, save_last=True)`, `ckpt_path=last`, torchdata's "
        "`StatefulDataLoader` with its `StatefulDistributedSampler`, a batch of 8 divided by the ranks",
    ),
    "fabric": Side(
        "Lightning Fabric",
        ("lightning",),
        "`fabric.save` of model, optimizer, scheduler and iteration, `fabric.load` of the newest file; the loop skips "
        "the batches of its epoch and sets the epoch of PyTorch's `DistributedSampler`",
    ),
    "accelerate": Side(
        "accelerate",
        ("accelerate",),
        "`save_state` and `load_state` with `automatic_checkpoint_naming`, `skip_first_batches`, "
        "`split_batches=True`, `use_seedable_sampler=True`, and a registered object with the number of steps",
        "checkpoints",
    ),
    "trl_sft": Side("TRL SFT", ("accelerate", "trl", "datasets"), "as HF Trainer"),
    "trl_grpo": Side(
        "TRL GRPO", ("accelerate", "trl", "datasets"), "as HF Trainer; a prompt with 4 completions counts as 4 samples"
    ),
}

COLUMNS = [
    Column(key="continued", heading="continued"),
    Column(key="equal", heading="bits equal"),
    Column(key="apart", heading="relative difference of weights", format=".1e", spread=True),
    Column(key="repeated", heading="samples repeated", format=".0f", spread=True),
    Column(key="skipped", heading="skipped", format=".0f", spread=True),
    Column(key="lost", heading="steps lost", format=".0f", spread=True),
    Column(key="seconds", heading="s to the first step", format=".1f", spread=True),
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of the runs.

    Attributes:
        steps: optimizer steps, two epochs.
        save_every: steps between saves.
        batch_size: samples of a step on all ranks together.
        seq_len: tokens of a row.
    """

    steps: int = 24
    save_every: int = 4
    batch_size: int = 8
    seq_len: int = 32
    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 2
    num_heads: int = 4
    lr: float = 1e-3
    seed: int = 1
    dropout: float = 0.1

    @property
    def rows(self) -> int:
        """Rows of the dataset."""
        return self.steps * self.batch_size // 2

    def job(self, side: str, folder: Path, name: str, ranks: int, *, resume: bool) -> dict[str, Any]:
        """Return the job of one start of a side.

        Args:
            side: key of `SIDES`.
            folder: working folder, with the initial model.
            name: name of this start's log and final weights in `folder`.
            ranks: number of ranks.
            resume: continue from the newest checkpoint.
        """
        config = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "max_position_embeddings": 2 * self.seq_len,
            "tie_word_embeddings": True,
        }
        same = ("steps", "save_every", "batch_size", "seq_len", "vocab_size", "lr", "seed", "dropout", "rows")
        return {
            **{key: getattr(self, key) for key in same},
            "config": config,
            "model": str(folder / "model"),
            "folder": str(folder / "run"),
            "log": str(folder / f"{name}.log"),
            "final": str(folder / f"{name}.pt"),
            "ranks": ranks,
            "resume": resume,
            "overrides": self._overrides(side, folder / "model"),
        }

    def _overrides(self, side: str, model: Path) -> list[str]:
        """Return the overrides for foundry's sides."""
        own = [
            *LLAMA,
            f"model.init_from={model}",
            f"model.vocab_size={self.vocab_size}",
            f"model.max_seq_len={2 * self.seq_len}",
            f"model.hidden_size={self.hidden_size}",
            f"model.intermediate_size={self.intermediate_size}",
            f"model.num_layers={self.num_layers}",
            f"model.num_heads={self.num_heads}",
            f"model.num_kv_heads={self.num_heads}",
            "model.norm_eps=1e-6",
            "model.tie_embeddings=true",
            f"objective.attention_dropout={self.dropout}",
        ]
        return [
            "objective=sft",
            *(own if side == OWN else ["model=hf", f"model.path={model}"]),
            "optimizer=adamw",
            "optimizer.weight_decay=0",
            "scheduler=linear",
            "scheduler.warmup=0",
            "hparams.grad_clip_norm=1.0",
            "precision=fp32",
            "device=cpu",
            *(word for word in QUIET if word != "checkpoint=none"),
            f"checkpoint.interval={self.save_every}",
            f"checkpoint.keep_last={self.steps}",
            f"hparams.lr={self.lr}",
            f"hparams.max_steps={self.steps}",
            f"hparams.seed={self.seed}",
            f"hparams.global_batch_size={self.batch_size}",
            f"hparams.per_gpu_batch_size={self.batch_size // RANKS[-1]}",
        ]


SMOKE = Plan(steps=8, save_every=2, batch_size=4, seq_len=16, vocab_size=64, hidden_size=16, intermediate_size=32)


@dataclass(frozen=True)
class Moment:
    """Moment of a kill, equal on all sides.

    Attributes:
        kind: `step`: while `step` is trained; `save`: in the save after `step`.
        step: number of the step.
        fraction: the kill comes after this fraction of the step or save, 0 to 1.
    """

    kind: str
    step: int
    fraction: float


@dataclass
class Trace:
    """Log of one start.

    Attributes:
        times: time of the end of each step on rank 0, in seconds, by number.
        ids: ids of the samples of each step on all ranks, by number.
    """

    times: dict[int, float] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, log: Path) -> "Trace":
        """Return the trace of the files of all ranks; samples of a step that did not end are left out."""
        trace = cls()
        for file in sorted(log.parent.glob(f"{log.name}.*")):
            pending = list[int]()
            for text in file.read_text().splitlines(keepends=True):
                if not text.endswith("\n"):
                    break
                line = json.loads(text)
                pending += line.get("ids", [])
                if "step" in line:
                    trace.ids.setdefault(line["step"], []).extend(pending)
                    if file.suffix == ".0":
                        trace.times[line["step"]] = line["time"]
                    pending = []
        return trace

    def epochs(self, plan: Plan) -> tuple[Counter[int], Counter[int]]:
        """Return how often each sample was trained in either epoch."""
        counts = Counter[int](), Counter[int]()
        for step, ids in self.ids.items():
            counts[min(1, (step - 1) // (plan.steps // 2))].update(ids)
        return counts


def compare(plan: Plan, whole: Trace, before: Trace, after: Trace) -> dict[str, float]:
    """Return the samples that a continued run repeated and skipped in an epoch, and the steps that it lost.

    Args:
        plan: sizes of the runs.
        whole: trace of the undisturbed run.
        before: trace up to the kill; its steps count up to the checkpoint.
        after: trace of the start that continued the run.
    """
    first = min(after.times)
    kept = {step: ids for step, ids in before.ids.items() if step < first}
    pairs = list(zip(Trace(ids=kept | after.ids).epochs(plan), whole.epochs(plan), strict=True))
    return {
        "repeated": sum((trained - wanted).total() for trained, wanted in pairs),
        "skipped": sum((wanted - trained).total() for trained, wanted in pairs),
        "lost": max(before.times) - first + 1,
    }


class Start(Life):
    """A process of a side and its children; a mark in the environment identifies them."""

    def __init__(self, side: str, job: Mapping[str, Any], folder: Path) -> None:
        file = Path(job["log"]).with_suffix(".json")
        file.write_text(json.dumps(job))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job['ranks']}"]
        self.mark, self.began = uuid.uuid4().hex, time.time()
        self.output = Path(job["log"]).with_suffix(".txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *(torchrun if job["ranks"] > 1 else []), str(SCRIPT), side, str(file)],
            cwd=folder,
            env=_environment(folder) | {MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def end(self) -> str:
        """Wait for the end; return the reason if the process failed or hung, otherwise an empty string."""
        try:
            code = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"hung: no end after {TIMEOUT:.0f} s"
        finally:
            self.kill()
            self.output.close()
        return _reason(Path(self.output.name).read_text()) if code else ""


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "FOUNDRY_CACHE": str(folder / "cache"),
    }


def _reason(output: str) -> str:
    """Return the first error line of a failed process, or its last line."""
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[0 if errors else -1]


class Watch(threading.Thread):
    """Thread that records when a file or folder in a folder changes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.changes, self._folder, self._ended = list[float](), folder, threading.Event()

    def run(self) -> None:
        """Look until `stop` is called."""
        state = self._state()
        while not self._ended.wait(0.0005):
            if (now := self._state()) != state:
                state = now
                self.changes.append(time.time())

    def stop(self) -> list[float]:
        """End the thread and return the times."""
        self._ended.set()
        self.join()
        return self.changes

    def _state(self) -> set[tuple[str, int, int]]:
        found = set[tuple[str, int, int]]()
        for parent, folders, files in os.walk(self._folder):
            for path in (f"{parent}/{name}" for name in (*folders, *files)):
                with suppress(FileNotFoundError):
                    status = os.lstat(path)
                    found.add((path, status.st_size, status.st_mtime_ns))
        return found


@dataclass
class Continued:
    """A killed run that was continued.

    Attributes:
        moment: moment of the kill.
        reason: error of the documented call; empty if it continued.
        by_hand: error after the newest checkpoint was deleted; None if nothing was deleted.
        step: step of the checkpoint that it continued from.
        values: values of the columns for this run; empty if the documented call failed.
    """

    moment: Moment
    reason: str
    by_hand: str | None = None
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)


@dataclass
class Measured:
    """Measurements of a side.

    Attributes:
        same_bits: two undisturbed runs on one rank end with the same bits.
        other_ranks: relative difference of the weights between undisturbed runs on two ranks and on one.
        save_seconds: median seconds from the end of a step to the end of the save that follows it.
        continued: continued runs, by number of ranks.
    """

    same_bits: bool
    other_ranks: float
    save_seconds: float
    continued: dict[int, list[Continued]]

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Measured":
        """Return the measurements of a JSON text."""
        fields: dict[str, Any] = json.loads(text)
        fields["continued"] = {
            int(ranks): [Continued(**{**run, "moment": Moment(**run["moment"])}) for run in runs]
            for ranks, runs in fields["continued"].items()
        }
        return cls(**fields)


class Bench:
    """Runs of one side.

    Args:
        side: key of `SIDES`.
        plan: sizes.
        folder: working folder of the side, with the initial model.
    """

    def __init__(self, side: str, plan: Plan, folder: Path) -> None:
        self.side, self.plan, self.folder = side, plan, folder
        self.run, self.killed = folder / "run", folder / "killed"
        self.saves = self.run / SIDES[side].saves

    def measure(self, moments: Sequence[Moment]) -> Measured:
        """Measure undisturbed runs, then kill and continue a run for each moment."""
        watch = Watch(self.saves)
        watch.start()
        self._undisturbed("whole", 1)
        save_seconds = self._save_seconds(watch.stop())
        self._undisturbed("again", 1)
        self._undisturbed("ranks", 2)
        continued: dict[int, list[Continued]] = {ranks: [] for ranks in RANKS}
        for number, moment in enumerate(moments):
            self._kill(f"killed{number}", moment, save_seconds)
            for ranks in RANKS:
                continued[ranks].append(self._continue(f"killed{number}", ranks, moment))
        return Measured(
            same_bits=self._apart("again") == 0,
            other_ranks=self._apart("ranks"),
            save_seconds=save_seconds,
            continued=continued,
        )

    def _start(self, name: str, ranks: int, *, resume: bool) -> Start:
        return Start(self.side, self.plan.job(self.side, self.folder, name, ranks, resume=resume), self.folder)

    def _undisturbed(self, name: str, ranks: int) -> None:
        self._clear()
        reason = self._start(name, ranks, resume=False).end()
        if reason or not (self.folder / f"{name}.pt").exists():
            raise RuntimeError(f"{SIDES[self.side].title} did not train on {ranks} ranks: {reason}")

    def _clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir()

    def _save_seconds(self, changes: Sequence[float]) -> float:
        times, every = Trace.read(self.folder / "whole.log").times, self.plan.save_every
        seconds = list[float]()
        for step in range(every, self.plan.steps - every + 1, every):
            ends = [change for change in changes if times[step] <= change < times[step + every]]
            seconds += [max(ends) - times[step]] if ends else []
        return median(seconds)

    def _kill(self, name: str, moment: Moment, save_seconds: float) -> None:
        """Kill a new run at the moment, and keep its files in `killed`."""
        self._clear()
        times = Trace.read(self.folder / "whole.log").times
        step_seconds = median(times[step] - times[step - 1] for step in range(2, self.plan.steps, 2))
        start, log, pids = self._start(name, 1, resume=False), self.folder / f"{name}.log.0", list[int]()
        seconds = moment.fraction * (save_seconds if moment.kind == "save" else step_seconds)
        while start.process.poll() is None:
            lines = log.read_text().splitlines() if log.exists() else []
            number = sum("step" in line for line in lines)
            pids = pids if pids or number == 0 else start.tree()
            # A step begins when its first samples reach the model, which is after a save.
            is_in_step = number >= moment.step or (number == moment.step - 1 and "ids" in lines[-1])
            if number >= moment.step if moment.kind == "save" else is_in_step:
                time.sleep(seconds)
                break
            time.sleep(0.0005)
        alive = start.kill(pids)
        start.output.close()
        if not alive:
            reason = _reason(Path(start.output.name).read_text())
            raise RuntimeError(f"{SIDES[self.side].title} ended before the kill: {reason}")
        shutil.rmtree(self.killed, ignore_errors=True)
        shutil.copytree(self.run, self.killed, symlinks=True)

    def _continue(self, killed: str, ranks: int, moment: Moment) -> Continued:
        """Continue the killed run on some ranks, and compare the result with the undisturbed run."""
        name = f"{killed}on{ranks}"
        start, reason = self._try(name, ranks)
        if reason:
            result = Continued(moment, reason)
            newest = max(self.saves.iterdir(), key=lambda path: path.lstat().st_mtime_ns, default=None)
            if newest is not None:
                result.by_hand = self._try(f"{name}again", ranks, without=newest.name)[1]
            return result
        whole, before, after = (Trace.read(self.folder / f"{each}.log") for each in ("whole", killed, name))
        first = min(after.times)
        values = {"apart": self._apart(name), "seconds": after.times[first] - start.began}
        return Continued(moment, "", step=first - 1, values=values | compare(self.plan, whole, before, after))

    def _try(self, name: str, ranks: int, without: str | None = None) -> tuple[Start, str]:
        """Continue a copy of the killed run, without one checkpoint; return the start and the reason of a failure."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.killed, self.run, symlinks=True)
        if without is not None:
            newest = self.saves / without
            shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        start = self._start(name, ranks, resume=True)
        reason = start.end().replace(str(self.folder), "...")
        if not reason and not (self.folder / f"{name}.pt").exists():
            steps = Trace.read(self.folder / f"{name}.log").times
            reason = f"ended at step {max(steps, default=0)} of {self.plan.steps}"
        return start, reason

    def _apart(self, name: str) -> float:
        """Return the largest relative L2 difference of a tensor from the undisturbed run on one rank."""
        pairs = zip(*(torch.load(self.folder / f"{each}.pt") for each in (name, "whole")), strict=True)
        return max(float((mine - other).norm() / other.norm()) for mine, other in pairs)


def measure(side: str, plan: Plan, folder: Path, moments: Sequence[Moment]) -> Measured:
    """Measure a side in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = folder / "model.json"
    job.write_text(json.dumps(plan.job(side, folder, "model", 1, resume=False)))
    call(SCRIPT, "model", job, threads=default_threads())
    return Bench(side, plan, folder).measure(moments)


def plan_kills(plan: Plan, count: int, rng: random.Random) -> list[Moment]:
    """Return the moments of the kills: saves and steps alternate; those in saves are spread over the length of a save.

    Args:
        plan: sizes of the runs.
        count: number of kills.
        rng: source of the random numbers.
    """
    saves, moments = (count + 1) // 2, list[Moment]()
    places = rng.sample(range(saves), saves)
    for number in range(count):
        if number % 2:
            moments.append(Moment("step", rng.randrange(plan.save_every + 2, plan.steps), rng.random()))
        else:
            step = rng.randrange(2, plan.steps // plan.save_every) * plan.save_every
            moments.append(Moment("save", step, (places[number // 2] + rng.random()) / saves))
    return moments


def row_of(title: str, ranks: int, runs: Sequence[Continued]) -> Row:
    """Return the row of a side: runs continued from one rank on `ranks` ranks."""
    good = [run for run in runs if not run.reason]
    values: dict[str, Values] = {
        key: [run.values[key] for run in good] or None for key in ("apart", "repeated", "skipped", "lost", "seconds")
    }
    values["equal"] = f"{sum(run.values['apart'] == 0 for run in good)} of {len(good)}" if good else ""
    values["continued"] = f"{len(good)} of {len(runs)}"
    return Row(case=f"1 to {ranks}", side=title, values=values)


def notes_of(plan: Plan, moments: Sequence[Moment], measurements: Mapping[str, Measured]) -> list[str]:
    """Return the paragraphs below the table: conditions, settings, refusals and failures."""
    names = {side: SIDES[side].title for side in measurements}
    at_steps = [str(moment.step) for moment in moments if moment.kind == "step"]
    in_saves = [f"{moment.step} (at {moment.fraction:.0%})" for moment in moments if moment.kind == "save"]
    kills = [f"in the save after step {', '.join(in_saves)}"] if in_saves else []
    kills += [f"in step {', '.join(at_steps)}"] if at_steps else []
    notes = [
        f"Kills: {'; '.join(kills)}. Runs have {plan.steps} steps of {plan.batch_size} samples, {plan.rows} rows and a "
        f"save every {plan.save_every} steps; dropout of attention weights is {plan.dropout}. No side deletes "
        "checkpoints."
    ]
    seconds = ", ".join(f"{names[side]} {each.save_seconds * 1000:.0f}" for side, each in measurements.items())
    unfinished = {
        side: sum(run.moment.kind == "save" and run.step < run.moment.step for run in each.continued[1])
        for side, each in measurements.items()
    }
    listed = ", ".join(f"{names[side]} {number}" for side, number in unfinished.items())
    notes.append(
        f"Milliseconds from the end of a step to the end of its save, undisturbed: {seconds}. Kills inside a save "
        f"after which that save's checkpoint could not be used: {listed}."
    )
    apart = ", ".join(f"{names[side]} {each.other_ranks:.1e}" for side, each in measurements.items())
    notes.append(f"Relative difference of the weights between undisturbed runs on two ranks and on one: {apart}.")
    if differing := [names[side] for side, each in measurements.items() if not each.same_bits]:
        notes.append(f"Two undisturbed runs on one rank differ in bits: {', '.join(differing)}.")
    notes += [f"{names[side]}: {SIDES[side].settings}." for side in measurements]
    for side, each in measurements.items():
        for ranks, runs in each.continued.items():
            reasons = Counter((run.reason, run.by_hand) for run in runs if run.reason)
            for (reason, by_hand), count in reasons.items():
                refused = (
                    ranks > 1 and all(run.reason for run in runs) and not all(run.reason for run in each.continued[1])
                )
                after = {None: "", "": "; it continued after its newest checkpoint was deleted by hand"}
                more = after.get(by_hand, f"; without its newest checkpoint: `{by_hand}`")
                word = "refused" if refused else "failed"
                notes.append(f"{names[side]}, 1 to {ranks}, {word} {count} of {len(runs)}: `{reason[:300]}`{more}.")
    return notes


def headline_of(measurements: Mapping[str, Measured]) -> Headline:
    """Return the line of the short table: runs continued with the same bits on the same number of ranks."""
    equal = {
        side: f"{sum(not run.reason and run.values['apart'] == 0 for run in each.continued[1])}"
        for side, each in measurements.items()
    }
    kills = max(len(each.continued[1]) for each in measurements.values())
    peers = ", ".join(f"{number} {SIDES[side].title}" for side, number in equal.items() if side not in (OWN, OWN_HF))
    return Headline(
        what=f"Of {kills} killed runs, continued with the same bits on as many ranks",
        foundry=", ".join(
            f"{equal[side]} ({word})" for side, word in ((OWN, "own decoder"), (OWN_HF, "model=hf")) if side in equal
        ),
        beside=peers,
    )


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the chosen sides whose packages are installed; print the missing sides with an install command."""
    names = list[str]()
    for side in options.sides or ([OWN, "hf"] if options.smoke else list(SIDES)):
        if missing := [package for package in SIDES[side].packages if find_spec(package) is None]:
            print(f"{SIDES[side].title} is left out: {', '.join(missing)} is not installed (pip install -e '.[bench]')")
        else:
            names.append(side)
    return names


def main() -> None:
    """Compare the sides."""
    cli = parser(__doc__)
    cli.add_argument("--kills", type=int, default=5, help="killed runs of each side")
    cli.add_argument("--sides", nargs="+", choices=SIDES, metavar="SIDE", help=f"of {', '.join(SIDES)}; default: all")
    cli.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    cli.add_argument(
        "--keep", type=Path, help="folder for the files of all runs; sides measured there are not measured again"
    )
    options = cli.parse_args()
    plan, kills = (SMOKE, 1) if options.smoke else (Plan(), options.kills)
    moments = plan_kills(plan, kills, random.Random(options.seed))
    measurements = dict[str, Measured]()
    with tempfile.TemporaryDirectory(prefix="fidelity-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        for side in chosen(options):
            kept = folder / side / "measured.json"
            if not kept.exists():
                begin = time.monotonic()
                kept.write_text(measure(side, plan, folder / side, moments).to_json())
                print(f"{SIDES[side].title}: {time.monotonic() - begin:.0f} s", flush=True)
            measurements[side] = Measured.from_json(kept.read_text())
    rows = [
        row_of(SIDES[side].title, ranks, each.continued[ranks])
        for ranks in RANKS
        for side, each in measurements.items()
    ]
    finish(
        options,
        case="ranks",
        columns=COLUMNS,
        rows=rows,
        notes=notes_of(plan, moments, measurements),
        headlines=[headline_of(measurements)],
    )


if __name__ == "__main__":
    main()
