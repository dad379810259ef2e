"""Data loader that yields windows of microbatches in the global order."""

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
_TORCH_MESSAGE = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]*\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)\.|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
_REMEDIES = {
    "SIGKILL": "out of memory? Give the run more host memory, or lower data.num_workers",
    "SIGBUS": "shared memory is full; enlarge /dev/shm (docker: --shm-size), or lower data.num_workers",
}


class DataWorkerError(RuntimeError):
    """Raised when a data loader worker has died; the message has the cause and a remedy."""


@contextmanager
def explain_worker_deaths(prefetcher: Any = None) -> Iterator[None]:
    """Convert torch's errors about a dead data loader worker to `DataWorkerError`.

    Torch raises these errors from its SIGCHLD handler, which can interrupt any code of this process. If a worker dies
    while it sends a batch, torch may report a broken connection instead, which looks like a lost rank.

    Args:
        prefetcher: the iterator of the `DataLoader`, to get exit codes from its workers; None if it is not at hand.

    Raises:
        DataWorkerError: a worker has died.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        exit_codes = _exit_codes(getattr(prefetcher, "_workers", ()))
        match = _TORCH_MESSAGE.search(str(error))
        if not exit_codes and match is None:
            raise
        if not exit_codes and match is not None:
            exit_codes = {int(match["pid"]): _parse_exit_code(match)}
        raise DataWorkerError(_describe_death(*next(iter(exit_codes.items())))) from error


def _exit_codes(workers: Sequence[BaseProcess]) -> dict[int, int | None]:
    """Return the exit codes of the workers that failed, by process id.

    A dying process breaks its connections before its exit code is available, so this waits up to 1 s for a worker to
    exit. Meanwhile torch's SIGCHLD handler may raise an error about the same worker, which is ignored.
    """
    try:
        closed = connection.wait([worker.sentinel for worker in workers], _REAP_SECONDS) if workers else []
        for worker in workers:
            if worker.sentinel in closed:
                worker.join()
    except RuntimeError as error:
        if not _TORCH_MESSAGE.search(str(error)):
            raise
    return {cast(int, worker.pid): worker.exitcode for worker in workers if worker.exitcode not in (None, 0)}


def _parse_exit_code(match: "re.Match[str]") -> int | None:
    """Return the exit code in a message of torch, negative for a signal."""
    if match["code"]:
        return int(match["code"])
    names = {signal.strsignal(number): -number for number in signal.valid_signals()}
    return names.get(match["signal"])


def _describe_death(pid: int, code: int | None) -> str:
    name = signal.Signals(-code).name if code is not None and code < 0 else None
    outcome = f"was killed by {name}" if name else "has died" if code is None else f"ended with exit code {code}"
    remedy = _REMEDIES.get(name or "", "set data.num_workers=0 to read in the training process, which shows the error")
    return f"a data loader worker (process {pid}) {outcome}: {remedy}"


_BatchPositions = range | list[Pack]
"""Positions of a microbatch in the global order: a range with one position per row, or packs with several."""


class _PositionedReader:
    """Dataset indexed by position in the global order; torch's `DataLoader` calls `__getitems__` per microbatch."""

    def __init__(self, dataset: Dataset, order: GlobalOrder) -> None:
        self.dataset, self.order = dataset, order

    def __getitems__(self, batch_positions: _BatchPositions) -> Microbatch:
        if isinstance(batch_positions, range):
            batch = self.dataset.batch_at(self.order.indices(batch_positions).tolist(), batch_positions)
            return {**batch, "position": torch.arange(batch_positions.start, batch_positions.stop)}
        packs = [[int(self.order.indices(range(p, p + 1))[0]) for p in pack] for pack in batch_positions]
        batch = self.dataset.packed(packs)
        positions = torch.tensor([p for pack in batch_positions for p in pack], dtype=torch.int64)
        return {**batch, **find_bounds(batch["documents"]), "position": positions}


class Loader:
    """Window source that reads a dataset in its global order.

    Within the window that starts at position c, microbatch m of rank r holds the `per_gpu_batch_size` positions
    starting at c + (m * dp_size + r) * per_gpu_batch_size. The state is the number of consumed samples, the number of
    skipped samples, and whether the order is keyed.

    With packing, the samples of one window share rows. Every rank packs all samples of the window, and a microbatch
    holds at most `per_gpu_batch_size` rows instead of samples (for preference pairs: pairs of rows). The model sees the
    same samples in each step as without packing.
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
            dataset: training samples.
            order: global order of the samples.
            batch_size_at: function from the number of consumed samples to the global batch size.
            per_gpu_batch_size: samples per microbatch; with packing, rows.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            num_workers: worker processes that prefetch; 0 reads in this process.
            pin_memory: put microbatches into page-locked memory, for asynchronous copies to the device.
            tokens_per_sample: tokens of every sample, used if the dataset's `num_tokens` returns None; None if samples
                are not sequences of tokens.
            pack_tokens: row length in tokens for packing; None disables packing.

        Raises:
            ConfigError: packing is enabled, but the dataset does not provide the lengths of its samples.
        """
        if pack_tokens is not None and dataset.lengths_of([0]) is None:
            message = f"is true but {class_name(dataset)} has no lengths_of(), which packing requires"
            raise ConfigError(Violation("data.packing", f"{message}; set it to false"))
        self.samples = 0
        self._skipped = 0
        self._reader = _PositionedReader(dataset, order)
        self._batch_size_at, self._per_gpu = batch_size_at, per_gpu_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._tokens_per_sample, self._pack_tokens = tokens_per_sample, pack_tokens
        self._counts_tokens = dataset.num_tokens([0]) is not None
        self._prefetcher: Iterator[Microbatch] | None = None

    def next_window(self) -> Window:
        """Read the next window; the class docstring defines its positions."""
        num_samples = self._batch_size_at(self.samples)
        batches = list(self._positions(self.samples))
        if self._num_workers == 0:
            microbatches = [self._read(batch) for batch in batches]
        else:
            if self._prefetcher is None:
                self._prefetcher = self._start_prefetching()
            with explain_worker_deaths(self._prefetcher):
                microbatches = [next(self._prefetcher) for _ in batches]
        tokens = self._num_tokens(self.samples + self._skipped, num_samples)
        self.samples += num_samples
        return Window(microbatches, num_samples, tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of consumed and of skipped samples over all ranks, and a marker if the order is keyed."""
        order = {"order": _KEYED} if self._reader.order.is_keyed else {}
        return {"samples": self.samples, "skipped": self._skipped, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state["samples"]` samples, with the kind of order (keyed or table) that the state records."""
        self.samples, self._skipped = read_count(state, "samples"), read_count(state, "skipped")
        # A state without the marker is from an order with tables; earlier versions used tables for any size.
        self._reader.order.is_keyed &= state.get("order") == _KEYED
        self._prefetcher = None

    def tensors(self) -> dict[str, Tensor]:
        """Return an empty dict: the state has no tensors."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the state has no tensors."""

    def rewind(self, samples: int) -> None:
        """Reset the count of consumed samples to `samples`, but continue reading after the last window.

        The samples between the new and the old count are counted as skipped: the updates made with these samples are
        undone, and the samples are not read again.
        """
        self._skipped += self.samples - samples
        self.samples = samples
        self._prefetcher = None

    def _num_tokens(self, first: int, num_samples: int) -> int | None:
        """Return the tokens of `num_samples` samples (of all ranks) from position `first`."""
        if not self._counts_tokens:
            return None if self._tokens_per_sample is None else num_samples * self._tokens_per_sample
        indices = self._reader.order.indices(range(first, first + num_samples))
        return self._reader.dataset.num_tokens(indices.tolist())

    def _positions(self, start: int) -> Iterator[_BatchPositions]:
        """Yield the positions of each of this rank's microbatches, for the window after `start` consumed samples."""
        if self._pack_tokens is not None:
            yield from self._packs(start, self._pack_tokens)
            return
        stride = self._per_gpu * self._dp_size
        first = start + self._skipped + self._dp_rank * self._per_gpu
        for offset in range(first, first + self._batch_size_at(start), stride):
            yield range(offset, offset + self._per_gpu)

    def _packs(self, start: int, capacity: int) -> Iterator[list[Pack]]:
        """Yield the packs of each of this rank's microbatches; all ranks have equally many, of nearly equal size."""
        first = start + self._skipped
        positions = range(first, first + self._batch_size_at(start))
        lengths = self._reader.dataset.lengths_of(self._reader.order.indices(positions).tolist())
        assert lengths is not None
        packs = [[positions[i] for i in pack] for pack in first_fit_decreasing(lengths, capacity)]
        yield from deal(packs, per_gpu_batch_size=self._per_gpu, dp_rank=self._dp_rank, dp_size=self._dp_size)

    def _all_positions(self) -> Iterator[_BatchPositions]:
        start = self.samples
        while True:
            yield from self._positions(start)
            start += self._batch_size_at(start)

    def _read(self, positions: _BatchPositions) -> Microbatch:
        microbatch = self._reader.__getitems__(positions)
        return {name: tensor.pin_memory() for name, tensor in microbatch.items()} if self._pin_memory else microbatch

    def _start_prefetching(self) -> Iterator[Microbatch]:
        # The batch sampler uses a copy of this loader, which has no reference to the iterator. In a reference cycle,
        # the garbage collector would destroy the iterator's queues first, and the iterator would then wait 5 s for
        # each worker.
        position = copy(self)
        loader = DataLoader(
            cast(Any, self._reader),
            batch_sampler=cast(Any, position._all_positions()),
            collate_fn=cast(Any, _identity),
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=_begin_worker,
            # By default, torch draws the seed of the workers from the global generator, which dropout uses.
            generator=torch.Generator().manual_seed(self.samples),
        )
        with stop_signals.blocked_signals():
            prefetcher = iter(loader)
        for worker in cast(Any, prefetcher)._workers:
            worker._popen.terminate = worker._popen.kill  # workers ignore SIGTERM
        return prefetcher


def _begin_worker(worker: int) -> None:
    """Set up signal handling and garbage collection in a worker, which inherits both from the training process."""
    stop_signals.outlive()
    gc.enable()  # training disables automatic collection and collects between steps; a worker has no steps


def _identity(microbatch: Microbatch) -> Microbatch:
    return microbatch


def held_out_batches(
    dataset: Dataset, *, per_gpu_batch_size: int, dp_rank: int, dp_size: int, max_samples: int | None
) -> Iterator[Microbatch]:
    """Yield this rank's microbatches of the first `max_samples` validation samples (None: all), each sample once.

    All ranks have equally many microbatches. Samples that only fill up the last microbatches have position -1 and are
    ignored by the metrics.
    """
    stride = per_gpu_batch_size * dp_size
    total = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    for start in range(0, total, stride):
        first = start + dp_rank * per_gpu_batch_size
        positions = [p if p < total else -1 for p in range(first, first + per_gpu_batch_size)]
        batch = dataset.batch([max(p, 0) for p in positions])
        yield {**batch, "position": torch.tensor(positions)}
