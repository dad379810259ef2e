"""Columns: values that frozen models compute for every sample before the first step, kept in the run directory.

Their file contains, for example, the log-probabilities of a reference model, and digests of the data and of the frozen
models' weights. So a resumed run does not need the frozen models, and makes no other pass over the data.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from foundry.core.protocols import Objective, RunContext
from foundry.data.dataset import Dataset, WrappedDataset
from foundry.data.loader import held_out_batches
from foundry.data.splits import DataSplits
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.run_dir.files import replaced_atomically
from foundry.run_dir.names import COLUMNS
from foundry.training.step import to_device

_SPLITS = ("train", "validation")
log = logging.getLogger(__name__)

Columns = dict[str, dict[str, Tensor]]
"""Tensors by split and column name, (samples, ...) each, in host memory."""


class WithColumns(WrappedDataset):
    """A dataset whose samples have additional columns.

    Args:
        dataset: the wrapped dataset.
        columns: tensors by column name, (len(dataset), ...) each.
    """

    def __init__(self, dataset: Dataset, columns: Mapping[str, Tensor]) -> None:
        super().__init__(dataset)
        self._columns = columns

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample with its columns."""
        return {**super().__getitem__(index), **{name: column[index] for name, column in self._columns.items()}}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return samples stacked, with their columns."""
        return {**super().batch(indices), **self._columns_of(indices)}

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of these positions; its columns were computed without the augmentation of a position."""
        return {**super().batch_at(indices, positions), **self._columns_of(indices)}

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return packed rows, with the columns of their samples, (samples, ...) each, in the order of the packs."""
        samples = [index for pack in packs for index in pack]
        return {**super().packed(packs), **self._columns_of(samples)}

    def _columns_of(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return {name: column[rows] for name, column in self._columns.items()}


def join_columns(
    objective: Objective,
    build_frozen: Callable[[], tuple[Mapping[str, nn.Module], str]],
    run: RunContext,
) -> DataSplits:
    """Return the data with the objective's columns: read from the run directory, or computed and written to it.

    Args:
        objective: declares and computes the columns; afterwards it has no frozen models.
        build_frozen: returns the frozen models and the digest of their weights; called only if they are needed.
        run: context with the data and the run directory. If the run resumes from another run's checkpoint, the columns
            of that run are used.
    """
    world, identity = run.world, _digest(run.data)
    columns = None
    if run.resume_point is not None:
        origin = run.resume_point.folder.parents[1]
        columns = _read_together(origin / COLUMNS, {"data": identity}, world)
        if columns is not None and origin == run.run_dir:
            return _add_columns(run.data, columns)
        if columns is None and world.is_main:
            log.warning("%s is missing or has changed since it was written; computing it again", COLUMNS)
    metadata = {"data": identity}
    if columns is None:
        frozen, metadata["weights"] = build_frozen()
        columns = _read_together(run.run_dir / COLUMNS, metadata, world)
        if columns is not None:
            return _add_columns(run.data, columns)
        assert objective.compare is not None, "an objective with columns takes frozen models"
        objective.compare(frozen)
        columns = {split: _compute(objective, getattr(run.data, split), run) for split in _SPLITS}
        objective.compare({})
    if world.leads_disk:
        _write(run.run_dir / COLUMNS, columns, metadata)
    return _add_columns(run.data, columns)


def _compute(objective: Objective, dataset: Dataset, run: RunContext) -> dict[str, Tensor]:
    """Return the columns of a dataset; each rank computes them for its part of the samples, and gets them for all."""
    world, columns = run.world, dict[str, Tensor]()
    if world.is_main:
        log.info(
            "computing %s of %d samples, once before the first step", " and ".join(objective.columns), len(dataset)
        )
    batches = held_out_batches(
        dataset,
        per_gpu_batch_size=run.config.hparams.per_gpu_batch_size,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        max_samples=None,
    )
    for microbatch in batches:
        rows = microbatch["position"]
        with torch.no_grad(), run.autocast():
            values = objective.precompute(to_device(microbatch, world.device))
        for name, value in values.items():
            if name not in columns:
                columns[name] = value.new_zeros(len(dataset), *value.shape[1:])
            columns[name][rows[rows >= 0]] = value[(rows >= 0).to(value.device)]
    return {name: world.dp_sum(column).cpu() for name, column in columns.items()}


def _add_columns(data: DataSplits, columns: Columns) -> DataSplits:
    train, validation = (WithColumns(getattr(data, split), columns[split]) for split in _SPLITS)
    return replace(data, train=train, validation=validation)


def _digest(data: DataSplits) -> str:
    """Return a digest of the samples, independent of their location and order."""
    identity = {name: value for name, value in data.identity().items() if name != "order"}
    text = json.dumps({**identity, "validation": len(data.validation)}, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _write(file: Path, columns: Columns, metadata: Mapping[str, str]) -> None:
    flat = {
        f"{split}.{name}": column
        for split, columns_of_split in columns.items()
        for name, column in columns_of_split.items()
    }
    with replaced_atomically(file, durable=True) as stream:
        stream.write(save(flat, metadata={**metadata, "checksum": _checksum(flat)}))


def _read_together(file: Path, metadata: Mapping[str, str], world: World) -> Columns | None:
    """Return the columns in a file if every rank can read it and finds `metadata` in its metadata; otherwise None."""
    columns = _read(file, metadata)
    return columns if all(gather(columns is not None, world)) else None


def _read(file: Path, metadata: Mapping[str, str]) -> Columns | None:
    if file.is_symlink() or not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as file_reader:
            flat = {name: file_reader.get_tensor(name) for name in file_reader.keys()}  # noqa: SIM118 # not a mapping
            stored = file_reader.metadata() or {}
    except (SafetensorError, OSError):
        return None
    if any(stored.get(name) != value for name, value in metadata.items()) or stored.get("checksum") != _checksum(flat):
        return None
    columns: Columns = {split: {} for split in _SPLITS}
    for key, tensor in flat.items():
        split, _, name = key.partition(".")
        columns.setdefault(split, {})[name] = tensor
    return columns


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
