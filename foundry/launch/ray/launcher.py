"""`hydra/launcher=ray`: the jobs of a sweep on a Ray cluster.

Ray places and starts the ranks of a job; foundry keeps its own process group, checkpoints and restarts. The actors end
with this process, so if it is killed, the jobs save and stop, and the same command resumes the sweep.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.launcher import Ray, resolve_launcher
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import JobState, Unreachable
from foundry.launch.launchers import FrozenLauncher
from foundry.launch.ray.cluster import check_nodes, connect
from foundry.launch.ray.job import RayJob
from foundry.run_dir.files import read_tail
from foundry.run_dir.redact import one_line


class RayLauncher(FrozenLauncher):
    """Launcher that runs each job as a placement group with an actor for each rank."""

    title = "Ray"
    has_queue = True
    poll_seconds = (0.5, 2.0)

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        super().__init__(work, **settings)
        self._checked_settings: list[tuple[Ray, bool]] = []
        self._jobs = dict[str, RayJob]()

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Connect to the cluster, and check that its nodes can run each job.

        The same settings are checked once: after the death of a node, the jobs of a search wait for another one.

        Raises:
            ConfigError: Ray is not installed, no cluster responds, or no node can run a job.
        """
        connect(_resolve_settings(configs[0]))
        import ray

        for config in configs:
            settings, uses_gpu = _resolve_settings(config), config.device.kind is not DeviceKind.cpu
            if (settings, uses_gpu) in self._checked_settings:
                continue
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            check_nodes(settings, nodes, uses_gpu=uses_gpu)
            self._checked_settings.append((settings, uses_gpu))

    def places(self, configs: Sequence[DictConfig], limit: int) -> int:
        """Return the maximum number of jobs in Ray's queue and running."""
        return _resolve_settings(configs[0]).array_parallelism

    def submit(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Put jobs into Ray's queue.

        Raises:
            Unreachable: the head node of the cluster does not respond. The next call submits the jobs that Ray has not
                accepted yet.
        """
        ids = {job.index: str(job.index) for job in jobs}
        for job in jobs:
            known = self._jobs.get(ids[job.index])
            if known is None or known.has_ended:
                settings = _resolve_settings(job.config)
                self._jobs[ids[job.index]] = RayJob(self.work.__module__, job.run_dir, settings)
        with _outages():
            for job_id in ids.values():
                self._jobs[job_id].submit()
        return ids

    def poll(self, ids: Collection[str]) -> dict[str, JobState]:
        """Return the states of jobs; jobs that Ray has placed start, and jobs whose node died are submitted again.

        Raises:
            Unreachable: the head node of the cluster does not respond.
        """
        with _outages():
            return {job_id: self._jobs[job_id].poll() for job_id in ids if job_id in self._jobs}

    def cancel(self, ids: Collection[str], *, kill: bool = False) -> None:
        """Ask jobs to save and stop, or kill them.

        Raises:
            Unreachable: the head node of the cluster does not respond.
        """
        with _outages():
            for job_id in ids:
                self._jobs[job_id].stop(kill=kill)

    def logs(self, job_id: str) -> str:
        """Return the last line of output of the rank that failed first."""
        lines = read_tail(self._jobs[job_id].output()).strip().splitlines()
        return lines[-1].strip() if lines else ""


@contextmanager
def _outages() -> Iterator[None]:
    """Convert Ray's errors about a head node that does not respond.

    Raises:
        Unreachable: the head node does not respond.
    """
    from ray.exceptions import GetTimeoutError, RaySystemError, RpcError

    try:
        yield
    except (GetTimeoutError, RaySystemError, RpcError) as error:
        raise Unreachable(one_line(str(error))) from None


def _resolve_settings(config: DictConfig) -> Ray:
    settings = resolve_launcher(config)
    assert isinstance(settings, Ray)
    return settings
