"""Tokens per second, share of the device's peak (MFU) and memory of one GPU: foundry, a raw loop and HF Trainer.

    python benchmarks/mfu.py [--sizes 100m 1b 8b] [--sides foundry raw ...] [--modes eager compile]
        [--checkpointing none selective full] [--attention any flash cudnn] [--steps 12] [--rounds 1]

Each side trains every selected combination in bf16 mixed precision, in separate processes, in turn. Losses are compared
first. The attention kernel is torch's choice (any) or one of math, mem_efficient, flash and cudnn. Only foundry
supports `selective` checkpointing. AdamW's moments are fp32, except for 8b, which has bf16 moments; the peers do not
support them and are skipped for 8b. The row of a combination shows if it ran out of memory. FLOPs are 6 N + 12 L H Q T
per token (PaLM, Chowdhery et al., 2022, appendix B), without recomputation; peaks come from
foundry.training.throughput. On a CPU a tiny model tests the script; its MFU is empty, since the peak of a CPU is
unknown.
"""

import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import torch
from comparison import PEERS, Measured, default_threads, in_turn, installed, losses_apart, run_job, speeds, title
from language_model import OWN, SCRIPT, SMOKE, Case, Shape, flops_per_token, write_weights
from records import Column, Headline, Row, Values, finish, parser

from foundry.config.schemas.precision import PrecisionMode
from foundry.training.throughput import peak_flops

_LLAMA = {"vocab_size": 128_256, "max_seq_len": 4096}
SIZES = {
    "100m": Case(
        shape=Shape(
            hidden_size=768,
            intermediate_size=2048,
            num_layers=12,
            num_heads=12,
            num_kv_heads=12,
            vocab_size=32_768,
            max_seq_len=2048,
        ),
        batch_size=16,
        per_gpu_batch_size=8,
    ),
    "1b": Case(
        shape=Shape(hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8, **_LLAMA),
        batch_size=4,
        per_gpu_batch_size=2,
    ),
    "8b": Case(
        shape=Shape(hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8, **_LLAMA),
        batch_size=2,
        per_gpu_batch_size=1,
        overrides=("optimizer.moments_dtype=bf16",),
    ),
}
NO_PEERS = {"8b"}
COLUMNS = [
    Column(key="speed", heading="tokens/s", spread=True),
    Column(key="mfu", heading="MFU", format=".1%"),
    Column(key="memory", heading="peak, GiB", format=",.1f"),
    Column(key="apart", heading="losses apart", format=".1e"),
]
TOO_LARGE = "out of memory"


def measure(case: Case, side: str, weights: Path | None, folder: Path, threads: int) -> Measured:
    """Return the measurements of a run; only the key `TOO_LARGE` if the run was out of memory."""
    try:
        job = case.job(side, weights, folder / "measured.json")
        return run_job(SCRIPT, side, job=job, threads=threads)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return {TOO_LARGE: True}


def rows_of(name: str, case: Case, sides: dict[str, list[Measured]]) -> list[Row]:
    """Return the rows of one combination; sides that ran out of memory come last."""
    fit = {side: runs for side, runs in sides.items() if not any(TOO_LARGE in run for run in runs)}
    apart, flops = losses_apart(fit, tolerance=0.02) if fit else {}, flops_per_token(case.shape)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak, rows = peak_flops(device, PrecisionMode.amp_bfloat16), list[Row]()
    for side, runs in fit.items():
        speed = speeds(runs, "wall_seconds")
        values: dict[str, Values] = {
            "speed": speed,
            "mfu": None if peak is None else [each * flops / peak for each in speed],
            "memory": [(run["device_peak_mib"] or run["peak_mib"]) / 1024 for run in runs],
            "apart": [apart[side]],
        }
        rows.append(Row(case=name, side=title(side), values=values))
    return rows + [Row(case=name, side=title(side), values={"speed": TOO_LARGE}) for side in sides.keys() - fit.keys()]


def main() -> None:
    """Compare the sides."""
    cli = parser(__doc__)
    sides = [OWN, *PEERS]
    kernels = ["any", "math", "mem_efficient", "flash", "cudnn"]
    cli.add_argument("--sizes", nargs="+", choices=SIZES, default=["100m", "1b"])
    cli.add_argument("--sides", nargs="+", choices=sides, default=[OWN, "raw", "hf"])
    cli.add_argument("--modes", nargs="+", choices=["eager", "compile"], default=["eager", "compile"])
    cli.add_argument("--checkpointing", nargs="+", choices=["none", "selective", "full"], default=["none", "full"])
    cli.add_argument("--attention", nargs="+", choices=kernels, default=["any"])
    cli.add_argument("--steps", type=int, default=12)
    cli.add_argument("--rounds", type=int, default=1)
    cli.add_argument("--threads", type=int, default=default_threads())
    options = cli.parse_args()
    smoke = options.smoke or not torch.cuda.is_available()
    if smoke:
        print("no GPU or --smoke: sizes, modes and kernels of a smoke test; the numbers are not MFU")
        sizes = {"smoke": replace(SMOKE, precision="bf16")}
        options.modes, options.checkpointing, options.attention = ["eager"], ["full"], ["any"]
    else:
        sizes = {name: replace(SIZES[name], precision="bf16", steps=options.steps) for name in options.sizes}
    rows = list[Row]()
    combinations = list(product(options.modes, options.checkpointing, options.attention))
    for size, base in sizes.items():
        with tempfile.TemporaryDirectory() as temporary:
            taking_part = installed(options.sides) if size not in NO_PEERS else [OWN]
            weights = None if taking_part == [OWN] else write_weights(base, Path(temporary), options.threads)
            for number, (mode, checkpointing, attention) in enumerate(combinations):
                case = replace(base, compile=mode == "compile", checkpointing=checkpointing, attention=attention)
                able = [side for side in taking_part if side == OWN or checkpointing != "selective"]

                def run(
                    side: str,
                    turn: int,
                    case: Case = case,
                    weights: Path | None = weights,
                    root: str = f"{temporary}/{number}",
                ) -> Measured:
                    folder = Path(root, f"{side}_{turn}")
                    return measure(case, side, weights, folder, options.threads)

                results = in_turn(able, options.rounds, run)
                rows += rows_of(f"{size}, {mode}, {checkpointing}, {attention}", case, results)
    headlines = [headline for size in sizes if (headline := _headline(size, rows)) is not None]
    finish(
        options,
        case="size, mode, checkpointing, attention",
        columns=COLUMNS,
        rows=rows,
        chart="speed" if smoke else "mfu",
        headlines=headlines,
    )


def _headline(size: str, rows: list[Row]) -> Headline | None:
    """Return the highest MFU of foundry and of the peers for a size; None if foundry's MFU is not known."""
    best = dict[bool, float]()
    for row in rows:
        values = row.values.get("mfu")
        if row.case.startswith(f"{size},") and values is not None and not isinstance(values, str):
            best[row.side == OWN] = max(best.get(row.side == OWN, 0.0), median(values))
    if True not in best:
        return None
    beside = f"{best[False]:.1%} fastest peer" if False in best else ""
    return Headline(what=f"MFU of one GPU, {size}, bf16", foundry=f"{best[True]:.1%}", beside=beside)


if __name__ == "__main__":
    main()
