"""Global batch size as a function of the samples consumed: constant, ramped, or stepwise."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Self

from foundry.core.errors import as_text

LARGEST_COUNT = 10**18
"""Largest number of samples, tokens or steps; it fits into int64."""
MOST_STAGES = 10_000
"""Maximum number of batch sizes in a run, which keeps the list of its batch sizes in memory."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(?P<number>(\d+\.?\d*|\.\d+)(e\+?\d{1,2})?)(?P<suffix>[kmbt]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Stage:
    """Consecutive optimizer steps with the same batch size.

    Attributes:
        first_step: optimizer steps before the stage.
        first_sample: samples consumed before the stage.
        global_batch_size: samples per optimizer step in the stage.
    """

    first_step: int
    first_sample: int
    global_batch_size: int


class BatchSizes:
    """Step function from samples consumed to batch size, with the optimizer steps that result from it.

    A step uses the size at the number of samples consumed before the step, so a step may extend beyond the next
    threshold. `stages` groups the resulting steps by size. After the last threshold the size is constant.
    """

    def __init__(self, thresholds: Iterable[tuple[int, int]]) -> None:
        """Create from pairs (samples consumed, batch size from then on), by increasing samples, the first at 0 samples.

        Raises:
            ValueError: a size is below 1.
        """
        self.thresholds = _merge_thresholds(thresholds)
        if (smallest := min(self.sizes)) < 1:
            raise ValueError(f"has a batch size of {smallest}; it must be at least 1")
        self._starts = [samples for samples, _ in self.thresholds]
        self.stages = tuple(_reached_stages(self.thresholds))
        self._stage_steps = [stage.first_step for stage in self.stages]
        self._stage_samples = [stage.first_sample for stage in self.stages]

    @classmethod
    def constant(cls, size: int) -> Self:
        """Create a constant batch size."""
        return cls([(0, size)])

    @classmethod
    def ramp(cls, *, start: int, increment: int, over_samples: int, final: int) -> Self:
        """Create Megatron-LM's linear ramp, including its rounding.

        Source: `RampupBatchsizeNumMicroBatchesCalculator`, core 0.17.1. With c samples consumed and P = over_samples *
        increment / (final - start) the size is start + increment * int(c / P) up to c = over_samples, and final beyond.

        Raises:
            ValueError: `start` or `over_samples` is below 1, or the size does not grow in 1 to `MOST_STAGES` whole
                increments.
        """
        if not 0 < start < final or increment <= 0 or (final - start) % increment:
            raise ValueError(f"does not grow from {start} to {final} in increments of {increment}")
        if over_samples <= 0:
            raise ValueError(f"has a length of {over_samples} samples; it must be at least 1")
        count = (final - start) // increment
        if count > MOST_STAGES:
            raise ValueError(
                f"grows from {start} to {final} in {count:,} increments of {increment}, but a run may have at most "
                f"{MOST_STAGES:,} batch sizes; give a larger increment"
            )
        samples_per_increment = over_samples / count
        increases = [(_increment_start(k, samples_per_increment), start + increment * k) for k in range(1, count + 1)]
        reachable = [(samples, size) for samples, size in increases if samples <= over_samples]
        return cls([(0, start), *reachable, (over_samples + 1, final)])

    @classmethod
    def parse(cls, text: str, *, tokens_per_sample: int | None = None) -> Self:
        """Parse `"0:768 250B:1536"` (threshold:size), the format of Megatron-LM's `--step-batch-size-schedule`.

        Args:
            text: entries separated by spaces or commas, in any order.
            tokens_per_sample: if given, thresholds count tokens and are divided by this number, rounding down.

        Raises:
            ValueError: the text has another format or too many entries, its first threshold is not 0, or two thresholds
                are the same number of samples.
        """
        entries = [word for word in re.split(r"[\s,]+", text.strip()) if word]
        if not entries:
            raise ValueError('has no entry; write THRESHOLD:SIZE, such as "0:256 100M:512"')
        if len(entries) > MOST_STAGES:
            raise ValueError(f"has {len(entries):,} entries; a run may have at most {MOST_STAGES:,} batch sizes")
        pairs = sorted((threshold // (tokens_per_sample or 1), size) for threshold, size in map(_parse_entry, entries))
        if pairs[0][0] != 0:
            raise ValueError(f"'{as_text(text)}' starts at {pairs[0][0]} samples; the first threshold must be 0")
        for (earlier, _), (later, _) in pairwise(pairs):
            if earlier == later:
                unit = f" (of {tokens_per_sample} tokens each)" if tokens_per_sample else ""
                raise ValueError(
                    f"'{as_text(text)}' has two sizes for the threshold of {later} samples{unit}; remove one"
                )
        return cls(pairs)

    def rounded(self, multiple: int) -> Self:
        """Return a copy with each batch size rounded down to a multiple of `multiple`.

        Raises:
            ValueError: a size is below `multiple` and would become 0.
        """
        return type(self)((samples, size // multiple * multiple) for samples, size in self.thresholds)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes in the order of their thresholds."""
        return [size for _, size in self.thresholds]

    @property
    def final(self) -> int:
        """Batch size from the last threshold on."""
        return self.thresholds[-1][1]

    def at(self, samples: int) -> int:
        """Return the batch size of the optimizer step that starts when `samples` samples have been consumed."""
        return self.thresholds[bisect_right(self._starts, samples) - 1][1]

    def samples_after(self, steps: float) -> float:
        """Return the samples consumed by the first `steps` optimizer steps; integral for an integer number of steps."""
        stage = self.stages[bisect_right(self._stage_steps, steps) - 1]
        return stage.first_sample + (steps - stage.first_step) * stage.global_batch_size

    def steps_at(self, samples: float) -> float:
        """Return the optimizer steps in the first `samples` samples, including the fraction of the last step."""
        stage = self._stage_at(samples)
        return stage.first_step + (samples - stage.first_sample) / stage.global_batch_size

    def whole_steps(self, samples: int) -> int:
        """Return the number of complete optimizer steps in the first `samples` samples."""
        stage = self._stage_at(samples)
        return stage.first_step + (samples - stage.first_sample) // stage.global_batch_size

    def samples_before(self, end: float, steps: float) -> float:
        """Return the samples consumed by the last `steps` optimizer steps before `end` samples."""
        total = 0.0
        for stage in reversed(self.stages[1:]):
            if stage.first_sample < end:
                stage_steps = (end - stage.first_sample) / stage.global_batch_size
                if steps <= stage_steps:
                    return total + steps * stage.global_batch_size
                total = total + end - stage.first_sample
                steps = steps - stage_steps
                end = stage.first_sample
        return total + steps * self.stages[0].global_batch_size

    def _stage_at(self, samples: float) -> Stage:
        return self.stages[bisect_right(self._stage_samples, samples) - 1]


def parse_count(text: str) -> int:
    """Parse an integer with an optional suffix in either case: `9765625`, `250B`, `1.5M`, `1e6`.

    Raises:
        ValueError: the text is not a non-negative integer, or exceeds `LARGEST_COUNT`.
    """
    match = _COUNT.fullmatch(text.strip().replace("_", ""))
    if match is not None:
        # Decimal, because 2.01 * 1000 is not an integer in binary floating point.
        value = Decimal(match["number"]) * _SUFFIXES[match["suffix"].upper()]
        if value > LARGEST_COUNT:
            raise ValueError(f"'{as_text(text)}' is more than {LARGEST_COUNT:,}; give a smaller number")
        if value == int(value):
            return int(value)
    raise ValueError(f"'{as_text(text)}' is not a whole number; write 300000, 300k, 1.5M or 250B")


def _parse_entry(text: str) -> tuple[int, int]:
    threshold, colon, size = text.partition(":")
    if not colon:
        raise ValueError(f"'{as_text(text)}' is not THRESHOLD:SIZE, such as 250B:1536")
    pair = parse_count(threshold), parse_count(size)
    if pair[1] < 1:
        raise ValueError(f"'{as_text(text)}' has a batch size of {pair[1]}; it must be at least 1")
    return pair


def _increment_start(k: int, samples_per_increment: float) -> int:
    """Return the smallest integer c with int(c / samples_per_increment) >= k, in floating point as in Megatron."""
    samples = max(0, math.ceil(k * samples_per_increment) - 2)
    while int(samples / samples_per_increment) < k:
        samples += 1
    return samples


def _merge_thresholds(thresholds: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the thresholds that change the batch size; of several at the same number of samples, the last counts."""
    merged: list[tuple[int, int]] = []
    for samples, size in thresholds:
        if merged and merged[-1][0] == samples:
            merged.pop()
        if not merged or merged[-1][1] != size:
            merged.append((samples, size))
    return merged


def _reached_stages(thresholds: Sequence[tuple[int, int]]) -> Iterable[Stage]:
    """Yield the stages that optimizer steps reach, without stages that a single step jumps over."""
    step = samples = 0
    ends = [start for start, _ in thresholds[1:]]
    for (_, size), end in zip(thresholds, [*ends, None], strict=True):
        if end is None:
            yield Stage(step, samples, size)
        elif samples < end:
            yield Stage(step, samples, size)
            steps = -(-(end - samples) // size)
            step, samples = step + steps, samples + steps * size
