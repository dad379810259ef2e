"""Measure how many functions and files a reader must follow: `python benchmarks/walks.py`.

Runs small trainings in this process and records each call into the package. It counts the functions that receive the
whole configuration during a run, and the files entered by one SFT batch and by one GRPO update, from the request for
the batch to the end of the optimizer step.
"""

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import foundry
from foundry.config.schemas.root import Config
from foundry.training.step import TrainStep

PACKAGE = Path(foundry.__file__).parent
BASE = [
    "experiment=pretrain_arithmetic",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "data.num_rows=256",
    "hparams.max_steps=3",
    "evaluation.max_samples=4",
    "tracking=none",
]
# Steps 2 and 3 do nothing but train: no evaluation, no checkpoint, no logged metrics.
SHORT = ["hparams.max_steps=4", "evaluation.interval=null", "evaluation.max_samples=4", "checkpoint=none"]
SHORT += ["tracking=none", "tracking.log_every_n_steps=100"]
GRPO = ["objective.num_prompts_per_step=2", "objective.num_generations_per_prompt=4", "objective.max_new_tokens=8"]


class Walk:
    """Calls into the package, by function and by optimizer step.

    Attributes:
        given_config: functions that have received a `Config`, as (file, qualified name).
        files: files entered in each optimizer step.
    """

    def __init__(self) -> None:
        self.given_config: set[tuple[str, str]] = set()
        self.files: list[set[str]] = [set()]
        self._names: dict[CodeType, str | None] = {}

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call or a return, as the callback of `sys.setprofile`."""
        code = frame.f_code
        if code not in self._names:
            path = Path(code.co_filename)
            self._names[code] = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None
        file = self._names[code]
        if file is None:
            return
        if event == "call":
            self.files[-1].add(file)
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(name), Config) for name in arguments):
                self.given_config.add((file, code.co_qualname))
        elif event == "return" and code is TrainStep.__call__.__code__:
            self.files.append(set())


@contextmanager
def walking() -> Iterator[Walk]:
    """Context that records the calls of this thread and of threads that it starts."""
    walk = Walk()
    threading.setprofile(walk.record)
    sys.setprofile(walk.record)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main() -> None:
    """Run, count, and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = foundry.compose(BASE)
        with walking() as pretraining:
            foundry.run(base, run_dir=folder / "base")
        start = [*SHORT, "data.num_rows=64", f"model.path={folder / 'base'}"]
        with walking() as sft:
            foundry.run(foundry.compose(["experiment=sft_arithmetic", *start]), run_dir=folder / "sft")
        batch = ["hparams.global_batch_size=8", "hparams.per_gpu_batch_size=8"]
        grpo_run = foundry.compose(["experiment=grpo_arithmetic", *start, *GRPO, *batch])
        with walking() as grpo:
            foundry.run(grpo_run, run_dir=folder / "grpo")
    counts = {
        "functions that receive the whole configuration": sorted(" ".join(pair) for pair in pretraining.given_config),
        "files entered by a batch of sft": sorted(sft.files[2]),
        "files entered by an update of grpo": sorted(grpo.files[2]),
    }
    for name, paths in counts.items():
        print(f"{len(paths)} {name}", *paths, sep="\n  ")


if __name__ == "__main__":
    main()
