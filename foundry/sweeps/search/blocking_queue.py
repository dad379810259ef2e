"""Queue of the jobs of a search for launchers of other packages, which return when all jobs have ended."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from hydra.plugins.launcher import Launcher

from foundry.launch.composed_job import ComposedJob


class BlockingQueue:
    """Queue with the interface of `foundry.launch.job_queue.JobQueue`.

    Args:
        launcher: runs the jobs.
        limit: maximum number of jobs at a time.
    """

    interrupted = False

    def __init__(self, launcher: Launcher, *, limit: int) -> None:
        self._launcher, self._limit = launcher, limit
        self._waiting = list[ComposedJob]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def add(self, jobs: Sequence[ComposedJob]) -> None:
        """Keep jobs until `next_ended` runs them."""
        self._waiting += jobs

    def next_ended(self) -> list[ComposedJob]:
        """Run the waiting jobs to their ends, and return them; a launcher numbers the jobs of a call from the first."""
        jobs, self._waiting = self._waiting, []
        blocks = list[list[ComposedJob]]()
        for job in jobs:
            if blocks and job.index == blocks[-1][-1].index + 1:
                blocks[-1].append(job)
            else:
                blocks.append([job])
        for block in blocks:
            self._launcher.launch([job.overrides for job in block], initial_job_idx=block[0].index)
        return jobs

    @property
    def free(self) -> int:
        """Number of jobs that can be added."""
        return self._limit - len(self._waiting)
