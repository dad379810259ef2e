"""Language model that all sides of a comparison train with the same weights, rows, order, updates and precision.

The sides are defined in language_model_sides.py and run in separate processes: `foundry` trains its own decoder;
`foundry, model=hf` trains the model of transformers with foundry; the peers of comparison.py train the model of
transformers in their usual way.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from comparison import (
    LLAMA,
    NUM_WARMUP,
    PEERS,
    QUIET,
    TRAINED_ALIKE,
    Measured,
    default_threads,
    in_turn,
    installed,
    run_job,
)
from records import parser

SCRIPT = "language_model_sides.py"
LR, SEED = 1e-3, 0
PRECISIONS = {"fp32": "fp32", "bf16": "amp_bfloat16"}
OWN, HF = "foundry", "foundry, model=hf"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama, with the names of foundry and transformers."""

    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    max_seq_len: int = 256
    vocab_size: int = 8192

    def overrides(self) -> list[str]:
        """Return the overrides for foundry's decoder."""
        return [*LLAMA, *(f"model.{field.name}={getattr(self, field.name)}" for field in fields(self))]

    def config(self) -> dict[str, int]:
        """Return the arguments of transformers' `LlamaConfig`."""
        names = {
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "max_seq_len": "max_position_embeddings",
        }
        return {names.get(name, name): size for name, size in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Condition of a comparison.

    Attributes:
        shape: shape of the model; rows have its `max_seq_len` tokens.
        precision: one of `PRECISIONS`.
        steps: steps of each run; the first `NUM_WARMUP` are not timed.
        batch_size: rows of a step.
        per_gpu_batch_size: rows of a microbatch.
        compile: compile each block with torch.compile.
        checkpointing: activation checkpointing: none, full, or selective, which only foundry supports.
        attention: kernel of torch's scaled_dot_product_attention on a GPU, or any.
        overrides: further overrides for foundry.
    """

    shape: Shape = Shape()
    precision: str = "fp32"
    steps: int = 12
    batch_size: int = 16
    per_gpu_batch_size: int = 4
    compile: bool = False
    checkpointing: str = "none"
    attention: str = "any"
    overrides: tuple[str, ...] = ()

    def job(self, side: str, weights: Path | None, measured: Path) -> dict[str, Any]:
        """Return the job file for language_model_sides.py.

        Args:
            side: side that runs the job; `foundry, model=hf` trains the model of transformers with foundry.
            weights: folder in transformers' format; None for foundry's own initial weights.
            measured: file that the script writes.
        """
        model = [*self.shape.overrides(), *([] if weights is None else [f"model.init_from={weights}"])]
        overrides = [
            *(["model=hf", f"model.path={weights}"] if side == HF else model),
            *TRAINED_ALIKE,
            *QUIET,
            f"precision={PRECISIONS[self.precision]}",
            f"hparams.lr={LR}",
            f"hparams.max_steps={self.steps}",
            f"hparams.seed={SEED}",
            f"hparams.global_batch_size={self.batch_size}",
            f"hparams.per_gpu_batch_size={self.per_gpu_batch_size}",
            f"hparams.torchcompile={self.compile}",
            f"hparams.grad_checkpointing={self.checkpointing != 'none'}",
            *(["hparams.grad_checkpointing_policy=selective"] if self.checkpointing == "selective" else []),
            *self.overrides,
        ]
        return {
            "measured": str(measured),
            "num_warmup": min(NUM_WARMUP, self.steps - 1),
            "steps": self.steps,
            "seed": SEED,
            "lr": LR,
            "precision": PRECISIONS[self.precision],
            "batch_size": self.batch_size,
            "per_gpu_batch_size": self.per_gpu_batch_size,
            "seq_len": self.shape.max_seq_len,
            "vocab_size": self.shape.vocab_size,
            "config": self.shape.config(),
            "model": str(weights),
            "compile": self.compile,
            "checkpointing": self.checkpointing,
            "attention": self.attention,
            "overrides": overrides,
        }


CASES = {
    f"{precision}-{size}k": Case(shape=Shape(vocab_size=size * 1024), precision=precision)
    for size in (8, 32)
    for precision in PRECISIONS
}
SMOKE = Case(
    shape=Shape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, max_seq_len=16),
    batch_size=4,
    per_gpu_batch_size=2,
    steps=4,
)


def flops_per_token(shape: Shape) -> float:
    """Return the FLOPs per token of a forward and backward pass, as foundry counts them.

    They are 6 N + 12 L H Q T (PaLM, Chowdhery et al., 2022, appendix B), without recomputation.
    """
    import torch

    from foundry.models.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(**vars(shape))
    return model.flops_per_sample(shape.max_seq_len) / shape.max_seq_len


def comparison_parser(description: str | None, *, cases: Sequence[str], steps: int) -> argparse.ArgumentParser:
    """Build the parser of the arguments for cases, sides, steps, rounds and threads.

    Args:
        description: docstring of the script.
        cases: default cases, from `CASES`.
        steps: default number of steps of a run.
    """
    cli = parser(description)
    sides = [*PEERS, OWN, HF]
    cli.add_argument("--cases", nargs="+", choices=CASES, default=cases, metavar="CASE")
    cli.add_argument("--sides", nargs="+", choices=sides, default=sides, metavar="SIDE", help=", ".join(sides))
    cli.add_argument("--steps", type=int, default=steps)
    cli.add_argument("--rounds", type=int, default=3)
    cli.add_argument("--threads", type=int, default=default_threads())
    return cli


def chosen_cases(options: argparse.Namespace) -> dict[str, Case]:
    """Return the cases by name; `options` come from `comparison_parser`."""
    if options.smoke:
        return {"smoke": SMOKE}
    return {name: replace(CASES[name], steps=options.steps) for name in options.cases}


def train_chosen(options: argparse.Namespace) -> dict[str, dict[str, list[Measured]]]:
    """Return the measurements of each run, by case and side; `options` come from `comparison_parser`."""
    cases, rounds = chosen_cases(options), 1 if options.smoke else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FOUNDRY_CACHE"] = str(Path(folder, "cache"))
        return train_sides(cases, options.sides, folder=Path(folder), rounds=rounds, threads=options.threads)


def write_weights(case: Case, folder: Path, threads: int) -> Path:
    """Initialize weights for all sides and return their folder, which is created within `folder`."""
    run_job(SCRIPT, "weights", job=case.job(OWN, folder / "weights", folder / "written.json"), threads=threads)
    return folder / "weights"


def train_sides(
    cases: Mapping[str, Case], sides: Sequence[str], *, folder: Path, rounds: int, threads: int
) -> dict[str, dict[str, list[Measured]]]:
    """Train every case with every installed side, in turn; return the measurements of each run, by case and side.

    Args:
        cases: cases by name.
        sides: sides of language_model_sides.py.
        folder: working folder.
        rounds: runs of each side.
        threads: number of threads for torch.
    """
    taking_part, measurements = installed(sides), dict[str, dict[str, list[Measured]]]()
    for number, (name, case) in enumerate(cases.items()):
        base = folder / str(number)
        weights = write_weights(case, base, threads)

        def measure(side: str, turn: int, base: Path = base, case: Case = case, weights: Path = weights) -> Measured:
            job = case.job(side, weights, base / f"{side.replace(', ', '_')}_{turn}" / "measured.json")
            return run_job(SCRIPT, side.partition(",")[0], job=job, threads=threads)

        measurements[name] = in_turn(taking_part, rounds, measure)
    return measurements
