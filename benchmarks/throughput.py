"""Tokens per second of training: foundry, a raw loop, HF Trainer, Lightning and accelerate.

    python -m pip install -e '.[bench]'
    python benchmarks/throughput.py [--cases fp32-8k ...] [--sides raw ...] [--steps 12] [--rounds 3] [--threads 2]

A decoder with 4 layers of width 256 reads 16 sequences of 256 tokens per step, in 4 microbatches. Every run is a
separate process; sides take turns, round by round, and the first steps of a run are not timed. Losses of every step are
compared with the first side's before any time is shown. The output has tokens per second of wall and of CPU time
(median over the rounds, minimum and maximum), the ratio to the fastest peer, and the share of the machine's peak: FLOPs
of forward and backward passes per second, divided by the largest rate of matrix products in the same precision and with
as many threads, measured before and after the runs (matrix_products.py).
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from comparison import best_peer, describe_peer, losses_apart, run_job, speeds, title
from language_model import CASES, OWN, chosen_cases, comparison_parser, flops_per_token, train_chosen
from matrix_products import SIZES, SMOKE_SIZES
from records import Column, Headline, Row, finish

COLUMNS = [
    Column(key="wall", heading="tokens/s, wall", spread=True),
    Column(key="of_wall", heading="of the fastest peer", format=".2f"),
    Column(key="of_peak", heading="of the machine's peak", format=".0%"),
    Column(key="cpu", heading="tokens/s of CPU time", spread=True),
    Column(key="of_cpu", heading="of the fastest peer", format=".2f"),
    Column(key="apart", heading="losses apart", format=".1e"),
]


def measure_peaks(options: argparse.Namespace) -> dict[str, float]:
    """Return the peak FLOP/s of matrix products, by precision of the cases."""
    sizes, seconds = (SMOKE_SIZES, 0.1) if options.smoke else (SIZES, 2.0)
    precisions = sorted({case.precision for case in chosen_cases(options).values()})
    with tempfile.TemporaryDirectory() as folder:
        job = {"measured": str(Path(folder, "measured.json")), "sizes": sizes, "seconds": seconds}
        jobs = {precision: job | {"precision": precision} for precision in precisions}
        measured = {name: run_job("matrix_products.py", job=job, threads=options.threads) for name, job in jobs.items()}
    return {precision: found["peak"] for precision, found in measured.items()}


def main() -> None:
    """Compare the sides."""
    options = comparison_parser(__doc__, cases=list(CASES), steps=12).parse_args()
    cases, rows, headlines = chosen_cases(options), list[Row](), list[Headline]()
    before, measurements, after = measure_peaks(options), train_chosen(options), measure_peaks(options)
    for case, by_side in measurements.items():
        precision = cases[case].precision
        of_peak = flops_per_token(cases[case].shape) / max(before[precision], after[precision])
        apart = losses_apart(by_side)
        wall, cpu = (
            {side: speeds(runs, clock) for side, runs in by_side.items()} for clock in ("wall_seconds", "cpu_seconds")
        )
        most_wall, most_cpu = best_peer(wall, max), best_peer(cpu, max)
        for side in by_side:
            ratios = {"of_wall": [median(wall[side]) / most_wall], "of_cpu": [median(cpu[side]) / most_cpu]}
            ratios["of_peak"] = [median(wall[side]) * of_peak]
            values = {"wall": wall[side], "cpu": cpu[side], **ratios, "apart": [apart[side]]}
            rows.append(Row(case=case, side=title(side), values=values))
        if OWN in by_side:
            text, beside = f"{median(wall[OWN]):,.0f} (own decoder)", describe_peer(wall, most_wall, "fastest")
            headlines.append(Headline(what=f"Training a language model, {case}, tokens/s", foundry=text, beside=beside))
    finish(options, case="precision, vocabulary", columns=COLUMNS, rows=rows, chart="wall", headlines=headlines)


if __name__ == "__main__":
    main()
