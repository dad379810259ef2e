"""Reading windows of microbatches in the global order."""

import gc
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from foundry.core import stop_signals
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Microbatch, Window
from foundry.core.state_values import read_count
from foundry.data.dataset import Dataset, class_name
from foundry.data.order import GlobalOrder
from foundry.data.packing import Pack, deal, find_bounds, first_fit_decreasing

_KEYED = "keyed"
_REAP_SECONDS = 1.0
_TORCH_SAYS = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]*\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)\.|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
_REMEDIES = {
    "SIGKILL": "out of memory? Give the run more host memory, or lower data.num_workers",
    "SIGBUS": "shared memory is full; enlarge /dev/shm (docker: --shm-size), or lower data.num_workers",
}


class DataWorkerError(RuntimeError):
    """A process that reads ahead has died; the message says of what, and what to do."""


@contextmanager
def worker_deaths_explained(ahead: Any = None) -> Iterator[None]:
    """What torch says of a data loader worker that died, in plain words; it may say so wherever the process is.

    Where it died while it handed over a batch, torch may speak of a broken connection instead, as of one to a rank.

    Args:
        ahead: the iterator of the `DataLoader`, where it is at hand.

    Raises:
        DataWorkerError: a worker has died.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        ends = _exit_codes(getattr(ahead, "_workers", ()))
        text = _TORCH_SAYS.search(str(error))
        if not ends and text is None:
            raise
        if not ends and text is not None:
            ends = {int(text["pid"]): _parse_exit_code(text)}
        raise DataWorkerError(_how_it_died(*next(iter(ends.items())))) from error


def _exit_codes(workers: Sequence[BaseProcess]) -> dict[int, int | None]:
    """The exit codes of those that failed, by process.

    A process that dies closes its files, which breaks its connections, before its exit code can be had: it is waited
    for. Meanwhile torch's handler of SIGCHLD may raise what this finds out.
    """
    try:
        closed = connection.wait([worker.sentinel for worker in workers], _REAP_SECONDS) if workers else []
        for worker in workers:
            if worker.sentinel in closed:
                worker.join()
    except RuntimeError as error:
        if not _TORCH_SAYS.search(str(error)):
            raise
    return {cast(int, worker.pid): worker.exitcode for worker in workers if worker.exitcode not in (None, 0)}


def _parse_exit_code(text: "re.Match[str]") -> int | None:
    """The exit code, negative for a signal, in torch's words."""
    if text["code"]:
        return int(text["code"])
    names = {signal.strsignal(number): -number for number in signal.valid_signals()}
    return names.get(text["signal"])


def _how_it_died(pid: int, code: int | None) -> str:
    name = signal.Signals(-code).name if code is not None and code < 0 else None
    how = f"was killed by {name}" if name else "has died" if code is None else f"ended with exit code {code}"
    remedy = _REMEDIES.get(name or "", "data.num_workers=0 reads in the training process, which shows the error itself")
    return f"a data loader worker (process {pid}) {how}: {remedy}"


_Cut = range | list[Pack]
"""The positions of a microbatch: one a row, or several."""


class _PositionedReader:
    """The dataset by position in the global order, a microbatch at a time, as torch's `DataLoader` wants it."""

    def __init__(self, dataset: Dataset, order: GlobalOrder) -> None:
        self.dataset, self.order = dataset, order

    def __getitems__(self, cut: _Cut) -> Microbatch:
        if isinstance(cut, range):
            batch = self.dataset.batch_at(self.order.indices(cut).tolist(), cut)
            return {**batch, "position": torch.arange(cut.start, cut.stop)}
        packs = [[int(self.order.indices(range(p, p + 1))[0]) for p in pack] for pack in cut]
        batch = self.dataset.packed(packs)
        positions = torch.tensor([p for pack in cut for p in pack], dtype=torch.int64)
        return {**batch, **find_bounds(batch["documents"]), "position": positions}


class Loader:
    """A window source that reads a dataset in its global order.

    Within the window that starts at position c, rank r's microbatch m holds the `per_gpu_batch_size` positions from
    c + (m * dp_size + r) * per_gpu_batch_size on. The only state is how many samples were consumed, and left out.

    With packing the samples of the same window share rows. Every rank packs all of them, and microbatches hold at most
    `per_gpu_batch_size` rows in the place of samples, or of pairs twos of rows. The model sees the same samples in each
    step.
    """

    def __init__(
        self,
        *,
        dataset: Dataset,
        order: GlobalOrder,
        batch_size_at: Callable[[int], int],
        per_gpu_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        tokens_per_sample: int | None = None,
        pack_tokens: int | None = None,
    ) -> None:
        """Read `dataset` for one rank.

        Args:
            dataset: the training samples.
            order: their global order.
            batch_size_at: the global batch size after a number of consumed samples.
            per_gpu_batch_size: samples per microbatch.
            dp_rank: this rank, among those that divide the data.
            dp_size: their number.
            num_workers: processes that read ahead; 0 reads in this one.
            pin_memory: put microbatches into page-locked memory, for copies that do not block.
            tokens_per_sample: the same for all samples, unless the dataset counts them with `num_tokens`; None where
                they are not sequences of tokens.
            pack_tokens: tokens of a row that holds several samples; None: each has its own row.

        Raises:
            ConfigError: samples are to share rows, and the dataset does not know their lengths.
        """
        if pack_tokens is not None and dataset.lengths_of([0]) is None:
            message = f"is true but {class_name(dataset)} has no lengths_of(), by which samples are put into rows"
            raise ConfigError(Violation("data.packing", f"{message}; set it to false"))
        self.samples = 0
        self._skipped = 0
        self._reader = _PositionedReader(dataset, order)
        self._batch_size_at, self._per_gpu = batch_size_at, per_gpu_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._tokens_per_sample, self._pack_tokens = tokens_per_sample, pack_tokens
        self._counts_tokens = dataset.num_tokens([0]) is not None
        self._ahead: Iterator[Microbatch] | None = None

    def next_window(self) -> Window:
        """Read the next window; see the class for which positions it holds."""
        num_samples = self._batch_size_at(self.samples)
        cuts = list(self._cuts(self.samples))
        if self._num_workers == 0:
            microbatches = [self._read(cut) for cut in cuts]
        else:
            if self._ahead is None:
                self._ahead = self._read_ahead()
            with worker_deaths_explained(self._ahead):
                microbatches = [next(self._ahead) for _ in cuts]
        tokens = self._num_tokens(self.samples + self._skipped, num_samples)
        self.samples += num_samples
        return Window(microbatches, num_samples, tokens)

    def state_dict(self) -> dict[str, Any]:
        """The number of samples consumed, over all ranks, and of those left out; and whether the order is keyed."""
        order = {"order": _KEYED} if self._reader.order.is_keyed else {}
        return {"samples": self.samples, "skipped": self._skipped, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state["samples"]` samples, in the kind of order in which these were read."""
        self.samples, self._skipped = read_count(state, "samples"), read_count(state, "skipped")
        # Runs of earlier versions have read datasets of any size by tables.
        self._reader.order.is_keyed &= state.get("order") == _KEYED
        self._ahead = None

    def tensors(self) -> dict[str, Tensor]:
        """Nothing: a position in the order is a number."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing is to be loaded."""

    def rewind(self, samples: int) -> None:
        """Count from `samples` samples again, but read on after what was read last."""
        self._skipped += self.samples - samples
        self.samples = samples
        self._ahead = None

    def _num_tokens(self, first: int, num_samples: int) -> int | None:
        """Tokens of the samples of all ranks from a position on."""
        if not self._counts_tokens:
            return None if self._tokens_per_sample is None else num_samples * self._tokens_per_sample
        indices = self._reader.order.indices(range(first, first + num_samples))
        return self._reader.dataset.num_tokens(indices.tolist())

    def _cuts(self, start: int) -> Iterator[_Cut]:
        """The positions of each of this rank's microbatches in the window that starts at `start`."""
        if self._pack_tokens is not None:
            yield from self._packs(start, self._pack_tokens)
            return
        stride = self._per_gpu * self._dp_size
        first = start + self._skipped + self._dp_rank * self._per_gpu
        for offset in range(first, first + self._batch_size_at(start), stride):
            yield range(offset, offset + self._per_gpu)

    def _packs(self, start: int, capacity: int) -> Iterator[list[Pack]]:
        """Rows of this rank's microbatches, which are as many on every rank and of nearly the same size."""
        first = start + self._skipped
        positions = range(first, first + self._batch_size_at(start))
        lengths = self._reader.dataset.lengths_of(self._reader.order.indices(positions).tolist())
        assert lengths is not None
        packs = [[positions[i] for i in pack] for pack in first_fit_decreasing(lengths, capacity)]
        yield from deal(packs, per_gpu_batch_size=self._per_gpu, dp_rank=self._dp_rank, dp_size=self._dp_size)

    def _all_cuts(self) -> Iterator[_Cut]:
        start = self.samples
        while True:
            yield from self._cuts(start)
            start += self._batch_size_at(start)

    def _read(self, cut: _Cut) -> Microbatch:
        microbatch = self._reader.__getitems__(cut)
        return {name: tensor.pin_memory() for name, tensor in microbatch.items()} if self._pin_memory else microbatch

    def _read_ahead(self) -> Iterator[Microbatch]:
        # Of a copy, which does not hold the iterator: in a cycle it would end with the next garbage collection, after
        # its queues, and wait 5 s for each process.
        position = copy(self)
        loader = DataLoader(
            cast(Any, self._reader),
            batch_sampler=cast(Any, position._all_cuts()),
            collate_fn=cast(Any, _identity),
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=_begin_worker,
            # Or it would draw from the generator of dropout, whenever workers are started.
            generator=torch.Generator().manual_seed(self.samples),
        )
        with stop_signals.held_back():
            ahead = iter(loader)
        for worker in cast(Any, ahead)._workers:
            worker._popen.terminate = worker._popen.kill  # it outlives SIGTERM
        return ahead


def _begin_worker(worker: int) -> None:
    """In a process that reads ahead, which has inherited much from the one that trains."""
    stop_signals.outlive()
    gc.enable()  # it has no steps between which garbage could be collected


def _identity(microbatch: Microbatch) -> Microbatch:
    return microbatch


def held_out_batches(
    dataset: Dataset, *, per_gpu_batch_size: int, dp_rank: int, dp_size: int, max_samples: int | None
) -> Iterator[Microbatch]:
    """This rank's share of a held-out dataset, each sample once; every rank gets the same number of microbatches.

    Samples that fill up the last microbatches have position -1 and count for nothing.
    """
    stride = per_gpu_batch_size * dp_size
    total = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    for start in range(0, total, stride):
        first = start + dp_rank * per_gpu_batch_size
        positions = [p if p < total else -1 for p in range(first, first + per_gpu_batch_size)]
        batch = dataset.batch([max(p, 0) for p in positions])
        yield {**batch, "position": torch.tensor(positions)}
