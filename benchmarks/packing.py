"""Preference pairs in packed rows and in separate rows: the same windows in turn, on one core.

Responses have very different lengths. The output has, for each number of pairs at a time, the median over the windows
except the first ones of the useful tokens (without padding) per second of CPU time for reading, forward and backward,
and of the ratio of both sides; the fraction of computed tokens that are not padding; and the largest difference of
losses and gradients of a window. Zeros take the place of the cached log-probabilities of a reference model.

    python benchmarks/packing.py [--windows 8] [--batch 32]
"""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from records import Column, Headline, Row, Values, finish, parser
from torch import nn

from foundry import compose
from foundry.core.protocols import Objective, Window
from foundry.data.loader import Loader
from foundry.data.order import GlobalOrder
from foundry.data.packing import first_fit_decreasing
from foundry.engine.columns import WithColumns
from foundry.parallel.malloc import keep_freed_memory
from foundry.parts.data import build_data
from foundry.parts.model import build_model
from foundry.parts.objective import build_objective
from foundry.parts.optimization import build_optimizers
from foundry.training.step import set_schedule

SEQ_LEN, LR, WARM = 512, 1e-4, 2
COLUMNS = [
    Column(key="speed", heading="useful tokens/s of CPU time", spread=True),
    Column(key="share", heading="no padding", format=".0%"),
    Column(key="ratio", heading="of unpacked", format=".2f"),
    Column(key="apart", heading="losses apart", format=".1e"),
    Column(key="gradients", heading="gradients apart", format=".1e"),
]


def write_rows(path: Path, count: int) -> None:
    """Write pairs whose responses have log-normal lengths: half of them below 65 tokens, a few above 350."""
    generator = random.Random(0)

    def answer() -> str:
        length = min(400, max(4, int(generator.lognormvariate(3.6, 1.0))))
        return " ".join(str(generator.randrange(100)) for _ in range(length // 3 + 1))[:length]

    with path.open("w") as stream:
        for number in range(count):
            stream.write(json.dumps({"prompt": f"Count to {number}", "chosen": answer(), "rejected": answer()}) + "\n")


def pass_window(model: nn.Module, objective: Objective, loader: Loader) -> tuple[Window, float, float]:
    """Return the next window, its loss, and the CPU seconds of the pass; gradients stay in the parameters."""
    begin, total = time.process_time(), 0.0
    window = loader.next_window()
    count = sum(map(objective.num_valid, window.microbatches))
    for microbatch in window.microbatches:
        loss = objective.loss(model, microbatch).loss / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return window, total, time.process_time() - begin


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--windows", type=int, default=8)
    cli.add_argument("--batch", type=int, default=32, help="pairs of a window")
    args = cli.parse_args()
    if args.smoke:
        args.windows, args.batch = 1, 4
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "rows.jsonl", (args.windows + WARM) * args.batch + 100)
        config = compose(
            [
                "data=preferences",
                f"data.path={name}/rows.jsonl",
                f"data.cache_dir={name}/cache",
                "data.vocab_size=257",
                f"data.seq_len={SEQ_LEN}",
                "objective=dpo",
                "optimizer=adamw",
                "precision=fp32",
                *(f"model.{key}={size}" for key, size in {"hidden_size": 192, "intermediate_size": 512}.items()),
                *(f"model.{key}={size}" for key, size in {"num_layers": 4, "num_heads": 4, "num_kv_heads": 4}.items()),
            ]
        )
        rows, note = measure(config, args.windows, args.batch, (2,) if args.smoke else (1, 2, 4, 8))
    packed, unpacked = (fastest(rows, side) for side in ("packed", "unpacked"))
    headline = Headline(
        what="Preference pairs of ragged lengths, useful tokens per CPU-second, passes alone",
        foundry=f"{speed_of(packed):,.0f} packed",
        beside=f"{speed_of(unpacked):,.0f} foundry without packing, {unpacked.case} at a time, its fastest",
    )
    finish(
        args,
        case="pairs or packs at a time",
        columns=COLUMNS,
        rows=rows,
        notes=[note],
        chart="speed",
        headlines=[headline],
    )


def speed_of(row: Row) -> float:
    """Return the median of useful tokens per CPU-second."""
    speed = row.values["speed"]
    assert speed is not None
    assert not isinstance(speed, str)
    return median(speed)


def fastest(rows: Sequence[Row], side: str) -> Row:
    """Return the fastest row of a side, for any number of pairs at a time."""
    return max((row for row in rows if row.side == side), key=speed_of)


def measure(config: Any, num_windows: int, batch: int, sizes_at_once: Sequence[int]) -> tuple[list[Row], str]:
    """Return two rows for each number of pairs at a time, and a note on the packs of the first window."""
    data: Any = build_data(config)
    train = WithColumns(data.train, {"reference": torch.zeros(len(data.train), 2, dtype=torch.float64)})
    order = GlobalOrder(num_samples=len(train), fingerprint=data.fingerprint, seed=42)
    lengths = data.train.lengths_of(order.indices(range(batch)).tolist())
    packs = first_fit_decreasing(lengths, SEQ_LEN)
    share = lengths.sum() / (2 * len(packs) * SEQ_LEN)
    note = f"The first {batch} pairs have {lengths.sum():,} tokens: {len(packs)} packs of two rows of {SEQ_LEN}, "
    note += f"{share:.0%} full."
    rows = list[Row]()
    for per_gpu in sizes_at_once:
        model, objective = build_model(config), build_objective(config.objective, config.peft)
        (optimizer,) = build_optimizers(config, model)
        set_schedule([optimizer], LR)
        sizes: dict[str, Any] = {"batch_size_at": lambda samples: batch, "per_gpu_batch_size": per_gpu}
        loaders = [Loader(dataset=train, order=order, pack_tokens=pack, **sizes) for pack in (None, SEQ_LEN)]
        speeds, shares = (list[float](), list[float]()), (list[float](), list[float]())
        apart = gradients_apart = 0.0
        for number in range(WARM + num_windows):
            losses, gradients = [], []
            for which, loader in enumerate(loaders):
                optimizer.zero_grad()
                window, loss, seconds = pass_window(model, objective, loader)
                losses.append(loss)
                gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                if number >= WARM:
                    assert window.num_tokens is not None
                    computed = sum(microbatch["tokens"].numel() for microbatch in window.microbatches)
                    speeds[which].append(window.num_tokens / seconds)
                    shares[which].append(window.num_tokens / computed)
            optimizer.step()
            apart = max(apart, abs(losses[0] - losses[1]) / abs(losses[0]))
            largest = max(float(gradient.abs().max()) for gradient in gradients[0])
            differences = (float((one - other).abs().max()) for one, other in zip(*gradients, strict=True))
            gradients_apart = max(gradients_apart, max(differences) / largest)
        ratio = median(packed / plain for plain, packed in zip(*speeds, strict=True))
        plain: dict[str, Values] = {"speed": speeds[0], "share": shares[0]}
        packed: dict[str, Values] = {"speed": speeds[1], "share": shares[1], "ratio": [ratio]}
        packed |= {"apart": [apart], "gradients": [gradients_apart]}
        rows += [
            Row(case=str(per_gpu), side=side, values=values)
            for side, values in (("unpacked", plain), ("packed", packed))
        ]
    return rows, note


if __name__ == "__main__":
    main()
