"""`hydra/launcher=local`: parallel jobs of a sweep on this machine.

Jobs are forked from a server process that has imported torch and foundry once, so a job starts in a fraction of a
second. Each job has its own session, which Ctrl-C in the terminal does not reach; the launcher forwards Ctrl-C once.

If the launcher is killed, its jobs get SIGTERM: they save and stop, and the same command resumes the sweep. If they
continued, a restarted sweep would run in addition to them, with more jobs than the machine can hold.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.store import GROUPS, group_modules
from foundry.config.environment import default_variables, visible_gpus
from foundry.config.schemas.launcher import Local, resolve_launcher
from foundry.core.errors import ConfigError, Violation, counted
from foundry.core.part_names import current_path
from foundry.core.safe_path import VARIABLE
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import JobState, Phase
from foundry.launch.launchers import FrozenLauncher
from foundry.launch.ledger import say
from foundry.launch.local import begin_session, block_interrupts, describe_exit
from foundry.run_dir.files import open_regular
from foundry.run_dir.names import OUTPUT
from foundry.run_dir.status import write_status


@dataclass(frozen=True)
class Share:
    """Cores and GPUs assigned to a job.

    Attributes:
        cores: core numbers; empty if there are more jobs than cores, so that the operating system schedules them.
        gpus: device names as in CUDA_VISIBLE_DEVICES; empty on a machine without GPUs.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...]


class LocalLauncher(FrozenLauncher):
    """Launcher that runs `n_jobs` jobs at a time; a job that fails or dies has no effect on other jobs."""

    poll_seconds = (0.2, 0.2)

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        super().__init__(work, **settings)
        self._running = dict[str, tuple[ForkServerProcess, Share]]()
        self._ends = dict[str, JobState]()
        self._num_started = 0

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Check that no job needs more GPUs than are visible; on a machine without GPUs, nothing is checked.

        Raises:
            ConfigError: a job has more processes than there are GPUs; the message is about the first one.
        """
        gpus = visible_gpus()
        for config in configs:
            if gpus and (nproc := config.distributed.nproc_per_node) > len(gpus):
                message = f"is {nproc} but the number of visible GPUs is {len(gpus)}"
                raise ConfigError(Violation("distributed.nproc_per_node", message))

    def places(self, configs: Sequence[DictConfig], limit: int) -> int:
        """Divide the machine, and start the server that forks the processes of jobs."""
        settings = resolve_launcher(self.master)
        assert isinstance(settings, Local)
        nproc = max(config.distributed.nproc_per_node for config in configs)
        shares = divide(settings, nproc, sorted(os.sched_getaffinity(0)), visible_gpus(), limit)
        say(f"{counted(limit, 'job')}, {len(shares)} at a time")
        self._free_shares = deque(shares)
        with _threads(shares, nproc):
            self._server = _start_server(configs, self.work)
        return len(shares)

    def submit(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Start a process for each job."""
        ids = {}
        for job in jobs:
            write_status(job.run_dir, state="queued", reason="")
            share = _widened(self._free_shares.popleft(), job.config.distributed.nproc_per_node)
            process = self._server.Process(target=_run_job, args=(self.work, job.run_dir, share), name=str(job))
            process.start()
            self._num_started += 1
            ids[job.index] = str(self._num_started)  # not the process id, which a later job may get again
            self._running[ids[job.index]] = process, share
        return ids

    def poll(self, ids: Collection[str]) -> dict[str, JobState]:
        """Return the states of processes; the share of a process that has ended becomes free."""
        for job_id in ids:
            if job_id in self._running and (code := self._running[job_id][0].exitcode) is not None:
                process, share = self._running.pop(job_id)
                process.close()
                self._free_shares.append(share)
                self._ends[job_id] = JobState(phase=Phase.ENDED, detail=describe_exit(code))
        return {job_id: self._ends.get(job_id, JobState(phase=Phase.RUNNING)) for job_id in ids}

    def cancel(self, ids: Collection[str], *, kill: bool = False) -> None:
        """Send SIGTERM or SIGKILL to processes."""
        for process, _ in [self._running[job_id] for job_id in ids if job_id in self._running]:
            process.kill() if kill else process.terminate()

    def logs(self, job_id: str) -> str:
        """Return nothing: the exit code explains the end of a process."""
        return ""

    def wait(self, seconds: float) -> None:
        """Wait for a time, or until a process ends."""
        wait([process.sentinel for process, _ in self._running.values()], seconds)


def divide(settings: Local, nproc: int, cores: Sequence[int], gpus: Sequence[str], num_jobs: int) -> list[Share]:
    """Divide the machine into shares, one for each job that runs at the same time.

    Args:
        settings: settings of the launcher, with the number of parallel jobs.
        nproc: number of processes of a job; each takes one GPU if the machine has any.
        cores: cores that this process may use.
        gpus: visible GPUs.
        num_jobs: number of jobs, the upper limit of the number of shares.
    """
    if settings.n_jobs is not None:
        parallel_jobs = settings.n_jobs
    else:
        parallel_jobs = len(gpus) // nproc if gpus else max(1, len(cores) // max(settings.cores_per_job, nproc))
    count = min(parallel_jobs, num_jobs)
    cores_each, gpus_each = len(cores) // count, max(nproc, len(gpus) // count)
    return [
        Share(
            cores=tuple(cores[i * cores_each : (i + 1) * cores_each]),
            # Jobs share a GPU only if `n_jobs` is larger than the number of jobs that fit.
            gpus=tuple(gpus[(i * gpus_each + k) % len(gpus)] for k in range(gpus_each)) if gpus else (),
        )
        for i in range(count)
    ]


def _widened(share: Share, nproc: int) -> Share:
    """Return a share with a GPU for each process of a job that has more processes than the first jobs of the sweep."""
    gpus = visible_gpus()
    if not share.gpus or nproc <= len(share.gpus):
        return share
    first = gpus.index(share.gpus[0])
    return replace(share, gpus=tuple((gpus[first:] + gpus[:first])[:nproc]))


def _start_server(configs: Iterable[DictConfig], work: Callable[[Path], int]) -> ForkServerContext:
    """Start the fork server, and wait until it has imported the modules that the jobs need.

    The server blocks Ctrl-C in the terminal, which would end it with a traceback. If the launcher is ended while this
    function waits, the server ends too.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(sorted({work.__module__, *_modules(configs)}))
    # Start the resource tracker now, because its start unblocks SIGINT, which must be blocked below.
    resource_tracker.ensure_running()
    with block_interrupts():
        forkserver.ensure_running()
    warmup = server.Process()  # an empty process: its end is the only signal that the server is ready
    warmup.start()
    warmup.join()
    return server


def _modules(configs: Iterable[DictConfig]) -> set[str]:
    """Return the modules that the server imports: the training code and the foundry parts that the jobs use."""
    modules = {"foundry.engine.train", *(module.__name__ for name in GROUPS for module in group_modules(name))}
    for config in configs:
        # torch's optimizers always import the compiler; foundry's do not.
        if not str(OmegaConf.select(config, "optimizer._target_")).startswith("foundry."):
            modules.add("torch._dynamo")
        targets = (OmegaConf.select(config, f"{group!s}._target_") for group in config)
        paths = (current_path(str(target)) for target in targets if str(target).startswith("foundry."))
        modules |= {path.rpartition(".")[0] for path in paths}
    return modules


def _threads(shares: Sequence[Share], nproc: int) -> AbstractContextManager[None]:
    """Set OpenMP's variables so that each process uses its share of the cores.

    OpenMP reads the variables once, when the server imports torch.
    """
    return default_variables(
        {
            "OMP_NUM_THREADS": str(max(1, len(shares[0].cores) // nproc)),
            # As in `foundry.launch.start`: busy-waiting threads of one job would take CPU time from other jobs.
            "GOMP_SPINCOUNT": "10000",
            VARIABLE: "1",
        }
    )


def _run_job(work: Callable[[Path], int], run_dir: Path, share: Share) -> None:
    """Entry point of a job's process: take the job's cores and GPUs, and run the job.

    SIGINT is still blocked here, as in the server. A SIGINT from the terminal that arrived before the new session began
    is dropped: the launcher has received it too, and sends SIGTERM.
    """
    begin_session()
    _end_with_launcher()
    _redirect_output(run_dir / OUTPUT)
    if share.cores:
        os.sched_setaffinity(0, share.cores)
    if share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    sys.exit(work(run_dir))


def _redirect_output(path: Path) -> None:
    """Redirect the output of this process to a file; if it cannot be opened, keep printing to the launcher's output."""
    try:
        with open_regular(path, "ab", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    except OSError as error:
        say(f"the output of the job is printed here: {error}")


def _end_with_launcher() -> None:
    """Send SIGTERM to this process when the launcher ends; the parent, the fork server, lives until all jobs end."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watches the launcher", daemon=True).start()
