"""Profiling of selected steps: time and memory."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from foundry.parallel.device import dump_memory_history, record_memory_history

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)


class StepProfiler:
    """Records steps of one rank with torch's profiler, and on a GPU also the memory history.

    Args:
        folder: output folder for `trace-rank-00000.json.gz`, which https://ui.perfetto.dev opens, and on a GPU
            `memory-rank-00000.pickle`, which https://pytorch.org/memory_viz opens.
        rank: rank in the file names.
        steps: steps to record, counted from 1.
        device: device of the rank.
    """

    def __init__(self, folder: Path, *, rank: int, steps: range, device: torch.device) -> None:
        self._folder, self._name, self._device = folder, f"rank-{rank:05d}", device
        self._steps = steps
        self._profile: profile | None = None

    def around(self, step: int) -> AbstractContextManager[None]:
        """Return a context manager for a step, which records the step if selected, and writes the files after the last.

        If the step raises, nothing is written, since writing would wait for the device.
        """
        return self._record_step(step) if step in self._steps else nullcontext()

    def stop(self) -> None:
        """At the end of the run, write the recorded steps unless written, or warn if the run was too short for any."""
        if self._profile is not None:
            self._stop()
        elif self._steps:
            log.warning("no step is recorded: the run ended before tracking.profile.first_step=%d", self._steps[0])

    @contextmanager
    def _record_step(self, step: int) -> Iterator[None]:
        if self._profile is None:
            self._start()
        from torch.profiler import record_function

        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self._stop()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            record_memory_history()
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def _stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"trace-{self._name}.json.gz"
        self._profile.export_chrome_trace(str(trace))
        if self._device.type == "cuda":
            dump_memory_history(self._folder / f"memory-{self._name}.pickle")
        self._profile, self._steps = None, range(0)
        log.info("wrote a profile of the steps to %s", trace)
