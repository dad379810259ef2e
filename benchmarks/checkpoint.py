"""Cost of a checkpoint: seconds until it is durable, seconds that training waits, and memory.

One process saves the same state in turn: as a raw write with fsync, by foundry at once, by foundry in the background,
and by torch's `HuggingFaceStorageWriter`. The output has medians, and their ratios to the raw write. "Waits" is the
time that the training thread is blocked; memory is the growth of the process.

    python benchmarks/checkpoint.py [--megabytes 300] [--repeats 8] [--folder .]
"""

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from records import Column, Headline, Row, finish, parser
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from foundry.checkpoint.folder import problems
from foundry.checkpoint.saver import Checkpointer
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import find

NUM_TENSORS = 75
Measured = tuple[float, float]
COLUMNS = [
    Column(key="durable", heading="durable, s", format=".3f", spread=True),
    Column(key="of_raw", heading="of raw", format=".2f"),
    Column(key="waits", heading="waits, s", format=".3f", spread=True),
    Column(key="of_once", heading="of at once", format=".0%"),
    Column(key="first", heading="first waits, s", format=".3f"),
    Column(key="grown", heading="grows by, MB"),
]


def raw_write(folder: Path, state: dict[str, Tensor]) -> Measured:
    """Write all tensors to one synced file, in place of the previous one; return the seconds twice, for two columns."""
    begin = time.perf_counter()
    with (folder / "raw.partial").open("wb") as file:
        for tensor in state.values():
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    (folder / "raw.partial").replace(folder / "raw")
    seconds = time.perf_counter() - begin
    return seconds, seconds


def torch_write(folder: Path, state: dict[str, Tensor]) -> Measured:
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            dict(state),
            storage_writer=HuggingFaceStorageWriter(str(folder / "torch"), save_distributed=True),
            no_dist=True,
        )
    seconds = time.perf_counter() - begin
    shutil.rmtree(folder / "torch")
    return seconds, seconds


def saver(folder: Path, *, asynchronous: bool) -> Callable[[Path, dict[str, Tensor]], Measured]:
    """Return a function that saves a state as foundry's checkpoint of the next step; only the last one is kept."""
    world = World.single(torch.device("cpu"))
    run_dir = folder / ("background" if asynchronous else "once")
    run_dir.mkdir()
    checkpointer = Checkpointer(
        run_dir,
        world,
        model=nn.Module(),
        asynchronous=asynchronous,
        keep_last=1,
        keep_every_steps=None,
        strict=True,
    )
    steps = iter(range(10**6))

    def save_one(_: Path, state: dict[str, Tensor]) -> Measured:
        checkpointer.write(next(steps), tensors=lambda: state, manifest={}, rank_state={})
        checkpointer.finish()
        return checkpointer.seconds, checkpointer.blocked_seconds

    return save_one


def memory(field: str) -> int:
    """Return a field of /proc/self/status in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) // 1000
    raise KeyError(field)


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--megabytes", type=int, default=300)
    cli.add_argument("--repeats", type=int, default=8)
    cli.add_argument("--folder", type=Path, default=Path(), help="on the disk that is measured")
    options = cli.parse_args()
    if options.smoke:
        options.megabytes, options.repeats = 6, 1
    size = options.megabytes * 1_000_000 // 4 // NUM_TENSORS
    state = {f"t{index}": torch.rand(size) for index in range(NUM_TENSORS)}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        ways = {
            "raw write, fsync": raw_write,
            "foundry, at once": saver(folder, asynchronous=False),
            "foundry, in the background": saver(folder, asynchronous=True),
            "torch, `HuggingFaceStorageWriter`": torch_write,
        }
        measured: dict[str, list[Measured]] = {name: [] for name in ways}
        first, grown = {}, {}
        for repeat in range(options.repeats + 1):
            # Rotate the order, since a disk that is still busy slows the next save.
            turn = repeat % len(ways)
            for name in [*list(ways)[turn:], *list(ways)[:turn]]:
                Path("/proc/self/clear_refs").write_text("5")
                before = memory("VmRSS")
                result = ways[name](folder, state)
                if repeat == 0:
                    first[name], grown[name] = result, memory("VmHWM") - before
                else:
                    measured[name].append(result)
        begin = time.perf_counter()
        assert not problems(find(folder / "once"))
        verify = time.perf_counter() - begin
    medians = {name: tuple(map(statistics.median, zip(*each, strict=True))) for name, each in measured.items()}
    raw, once = medians["raw write, fsync"][0], medians["foundry, at once"][1]
    rows = [
        Row(
            side=name,
            values={
                "durable": [durable for durable, _ in each],
                "of_raw": [medians[name][0] / raw],
                "waits": [waits for _, waits in each],
                "of_once": [medians[name][1] / once],
                "first": [first[name][1]],
                "grown": [grown[name]],
            },
        )
        for name, each in measured.items()
    ]
    theirs = medians["torch, `HuggingFaceStorageWriter`"][0]
    headline = Headline(
        what=f"A durable checkpoint of {options.megabytes} MB, median",
        foundry=f"{once:.2f} s",
        beside=f"{theirs:.2f} s torch's `HuggingFaceStorageWriter`, {raw:.2f} s raw write",
    )
    notes = [
        f"{options.megabytes} MB in {NUM_TENSORS} tensors; {options.repeats} saves after a first. Verifying reads "
        f"{options.megabytes / verify / 1000:.1f} GB/s from the page cache."
    ]
    finish(options, side="way", columns=COLUMNS, rows=rows, notes=notes, chart="durable", headlines=[headline])


if __name__ == "__main__":
    main()
