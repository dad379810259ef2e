"""Rows of the configured files by split, and checks of the examples that are built from them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from foundry.config.schemas.data import OnBadRow, RowFiles
from foundry.config.sources import listed_paths
from foundry.core.errors import ConfigError, Violation
from foundry.data.conversations.examples import RowStatistics, list_skipped
from foundry.data.conversations.messages import FOR_TEMPLATE
from foundry.data.corpora.corpus import PATH, VALIDATION_PATH, HeldOutNumbers, find_corpus_files
from foundry.data.io.files import ROWS, Utf8
from foundry.data.io.rows import FileRows, Row, RowSplits
from foundry.data.mixture import Interleaved, Mixture, Sources, describe_sources, describe_weights, mixture_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Rows by split, with their fingerprint.

    Attributes:
        splits: rows of each split, read during iteration.
        places: names of the files, for errors.
        key: setting that errors refer to.
        remedy: remedy in error messages.
        on_bad_row: how to handle rows that cannot be used.
        fingerprint: hash of file contents, file names and split.
        content: the same hash without file names, followed by the weights.
        paths: paths of the sources, if there are several.
        weights: weights of the sources; None reads each row once per epoch.
        num_rows: counts all rows; None if the count is not available.
    """

    splits: RowSplits
    places: Sequence[str]
    fingerprint: str
    content: str
    paths: Sequence[str] = ()
    weights: Sequence[float] | None = None
    num_rows: Callable[[], int] | None = None
    key: str = PATH
    remedy: str = "correct them, or set data.on_bad_row=skip"
    on_bad_row: OnBadRow = OnBadRow.refuse


def find_rows(settings: RowFiles, columns: tuple[str, ...], *, reads_all: bool = False) -> RowSource:
    """Return the rows of the configured files; a fraction of them is held out if there are no validation files.

    For several paths, the training rows are a `Sources`, and the validation rows are evenly interleaved.

    Args:
        settings: paths, and options for reading rows.
        columns: known columns, at least one of them required; see `FileRows`.
        reads_all: read the other columns of tables as well.

    Raises:
        ConfigError: there are no files, they are of several kinds, or a file cannot be read; during iteration, if a
            source whose rows are split has fewer than two.
    """
    utf8, renames, weights = Utf8(settings.encoding_errors.value), settings.columns or {}, settings.weights
    description = f"rows {settings.held_out}{f' {sorted(renames.items())}' if renames else ''}"
    description += "" if utf8.is_strict else f" {utf8.errors}"
    corpus_files = find_corpus_files(settings, description=description, kinds=ROWS)
    places = list[str]()
    rows, validation_rows = list[FileRows](), list[FileRows]()
    for key, sources, split_rows in (
        (PATH, corpus_files.train, rows),
        (VALIDATION_PATH, corpus_files.validation, validation_rows),
    ):
        for files in sources:
            split_rows.append(
                FileRows(files, columns, key, len(places), reads_all, renames, utf8, optional_columns=FOR_TEMPLATE)
            )
            places += map(str, files)
    train: list[Iterable[Row]] = [
        source_rows if validation_rows else _Share(source_rows, settings.held_out, is_validation=False)
        for source_rows in rows
    ]
    validation: list[Iterable[Row]] = [*validation_rows] or [
        _Share(source_rows, settings.held_out, is_validation=True) for source_rows in rows
    ]
    return RowSource(
        splits=RowSplits(
            train[0] if len(train) == 1 else Sources(train),
            validation[0] if len(validation) == 1 else Interleaved(validation),
        ),
        places=places,
        fingerprint=corpus_files.fingerprint,
        content=f"{corpus_files.content}{describe_weights(weights)}",
        paths=listed_paths(settings.path),
        weights=weights,
        num_rows=None if validation_rows else lambda: sum(source_rows.count for source_rows in rows),
        on_bad_row=settings.on_bad_row,
    )


@dataclass(frozen=True)
class _Share:
    """Validation or training rows of a source; all rows are counted before the first one is yielded."""

    rows: FileRows
    held_out: float
    is_validation: bool

    def __iter__(self) -> Iterator[Row]:
        count = self.rows.count
        if count < 2:
            message = (
                f"{self.rows.files[0]} has {'one row' if count else 'no rows'}; give at least two rows, or more files"
            )
            raise ConfigError(Violation(PATH, message))
        validation_numbers = HeldOutNumbers.choose(count, self.held_out)
        for index, row in enumerate(self.rows):
            if (index in validation_numbers) == self.is_validation:
                yield row


def mix_rows(source: RowSource, sizes: Sequence[int], notes: dict[str, Any]) -> Mixture | None:
    """Describe several sources in `notes`, and return their mixture; None for one source or without weights.

    Raises:
        ConfigError: a source has no training row.
    """
    if not sizes:
        return None
    if 0 in sizes:
        message = f"{source.paths[list(sizes).index(0)]} has no usable row for training; give more rows"
        raise ConfigError(Violation(PATH, message))
    notes["sources"] = describe_sources(source.paths, sizes, source.weights)
    return mixture_of(sizes, source.weights)


def check_rows(source: RowSource, statistics: RowStatistics, train: Sized, validation: Sized) -> None:
    """Reject or warn about rows that cannot be used (by `on_bad_row`), and reject empty splits.

    Raises:
        ConfigError: a row cannot be used and `on_bad_row` is `refuse`, or a split is empty.
    """
    if statistics.skipped:
        summary, first = list_skipped(statistics, source.places)
        if source.on_bad_row is OnBadRow.refuse:
            raise ConfigError(Violation(source.key, line) for line in [*first, f"{summary}; {source.remedy}"])
        log.warning("%s and are skipped; the first: %s", summary, first[0])
    for name, split in (("training", train), ("validation", validation)):
        if not len(split):
            raise ConfigError(Violation(PATH, f"has no usable row for {name}; give more rows"))
