"""Peak resident memory of training: foundry, a raw loop, HF Trainer, Lightning and accelerate.

    python -m pip install -e '.[bench]'
    python benchmarks/memory.py [--cases fp32-32k ...] [--sides raw ...] [--steps 4] [--rounds 3] [--threads 2]

The model is that of throughput.py; at a vocabulary of 32k its logits take most of the memory. Every run is a separate
process, and sides take turns. The output has the largest resident set minus that of a process that has only imported
torch, and the growth after the start of the first step, without libraries, weights and data. Losses are compared first.
"""

from statistics import median

from comparison import best_peer, call, describe_peer, losses_apart, title
from language_model import HF, OWN, comparison_parser, train_chosen
from records import Column, Headline, Row, finish

COLUMNS = [
    Column(key="peak", heading="peak above `import torch`, MiB", spread=True),
    Column(key="of_peak", heading="of the least peer", format=".2f"),
    Column(key="grown", heading="grown in training, MiB", spread=True),
    Column(key="of_grown", heading="of the least peer", format=".2f"),
    Column(key="apart", heading="losses apart", format=".1e"),
]
IMPORT = "import resource, torch; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"


def main() -> None:
    """Compare the sides."""
    options = comparison_parser(__doc__, cases=["fp32-32k", "bf16-32k"], steps=4).parse_args()
    imported = median(float(call("-c", IMPORT, threads=options.threads)) for _ in range(options.rounds))
    rows, headlines = list[Row](), list[Headline]()
    for case, by_side in train_chosen(options).items():
        apart = losses_apart(by_side)
        peak = {side: [run["peak_mib"] - imported for run in runs] for side, runs in by_side.items()}
        grown = {side: [run["grown_mib"] for run in runs] for side, runs in by_side.items()}
        least_peak, least_grown = best_peer(peak, min), best_peer(grown, min)
        for side in by_side:
            ratios = {"of_peak": [median(peak[side]) / least_peak], "of_grown": [median(grown[side]) / least_grown]}
            values = {"peak": peak[side], "grown": grown[side], **ratios, "apart": [apart[side]]}
            rows.append(Row(case=case, side=title(side), values=values))
        if OWN in by_side:
            label = f"Peak memory of training above `import torch`, {case}, MiB"
            text = f"{median(peak[OWN]):,.0f} (own decoder)"
            text += f", {median(peak[HF]):,.0f} (model=hf)" if HF in peak else ""
            headlines.append(Headline(what=label, foundry=text, beside=describe_peer(peak, least_peak, "least")))
    notes = [f"A process that has imported torch and nothing else has {imported:,.0f} MiB."]
    finish(
        options,
        case="precision, vocabulary",
        columns=COLUMNS,
        rows=rows,
        notes=notes,
        chart="peak",
        headlines=headlines,
    )


if __name__ == "__main__":
    main()
