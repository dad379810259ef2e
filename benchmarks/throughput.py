"""Tokens per second of training: foundry, a raw loop, HF Trainer, Lightning and accelerate.

    python -m pip install -e '.[bench]'
    python benchmarks/throughput.py [--cases fp32-8k ...] [--sides raw ...] [--steps 12] [--rounds 3] [--threads 2]

A decoder with 4 layers of width 256 reads 16 sequences of 256 tokens per step, in 4 microbatches. Every run is a
separate process; sides take turns, round by round, and the first steps of a run are not timed. Losses of every step are
compared with the first side's before any time is shown. The output has tokens per second of wall and of CPU time
(median over the rounds, minimum and maximum), and the ratio to the fastest peer.
"""

from statistics import median

from comparison import best_peer, describe_peer, losses_apart, speeds, title
from language_model import CASES, OWN, comparison_parser, train_chosen
from records import Column, Headline, Row, finish

COLUMNS = [
    Column(key="wall", heading="tokens/s, wall", spread=True),
    Column(key="of_wall", heading="of the fastest peer", format=".2f"),
    Column(key="cpu", heading="tokens/s of CPU time", spread=True),
    Column(key="of_cpu", heading="of the fastest peer", format=".2f"),
    Column(key="apart", heading="losses apart", format=".1e"),
]


def main() -> None:
    """Compare the sides."""
    options = comparison_parser(__doc__, cases=list(CASES), steps=12).parse_args()
    rows, headlines = list[Row](), list[Headline]()
    for case, by_side in train_chosen(options).items():
        apart = losses_apart(by_side)
        wall, cpu = (
            {side: speeds(runs, clock) for side, runs in by_side.items()} for clock in ("wall_seconds", "cpu_seconds")
        )
        most_wall, most_cpu = best_peer(wall, max), best_peer(cpu, max)
        for side in by_side:
            ratios = {"of_wall": [median(wall[side]) / most_wall], "of_cpu": [median(cpu[side]) / most_cpu]}
            values = {"wall": wall[side], "cpu": cpu[side], **ratios, "apart": [apart[side]]}
            rows.append(Row(case=case, side=title(side), values=values))
        if OWN in by_side:
            text, beside = f"{median(wall[OWN]):,.0f} (own decoder)", describe_peer(wall, most_wall, "fastest")
            headlines.append(Headline(what=f"Training a language model, {case}, tokens/s", foundry=text, beside=beside))
    finish(options, case="precision, vocabulary", columns=COLUMNS, rows=rows, chart="wall", headlines=headlines)


if __name__ == "__main__":
    main()
