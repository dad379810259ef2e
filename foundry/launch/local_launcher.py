"""`hydra/launcher=local`: the jobs of a sweep side by side on this machine.

A job is a process that forks from a server that has imported torch and foundry once, so that it starts in a fraction of
a second. It has a session of its own, out of the reach of the terminal's Ctrl-C, which this process passes on once.

Where this process dies without a word, its jobs get SIGTERM: they save and stop, and the same command resumes from
there. Were they to train on, a sweep started again would run beside them, more jobs than the machine has room for.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.store import GROUPS, group_modules
from foundry.config.environment import default_variables, visible_gpus
from foundry.config.schemas.launcher import Local, resolve_launcher
from foundry.core.errors import ConfigError, Violation
from foundry.core.part_names import place_of
from foundry.core.safe_path import VARIABLE
from foundry.launch.launchers import ComposedJob, FrozenLauncher, Ledger, say
from foundry.launch.local import begin_session, ended_by, how_it_ended, interrupts_held, noted_signals
from foundry.run_dir.files import open_regular
from foundry.run_dir.names import OUTPUT
from foundry.run_dir.status import read_status, write_status

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Share:
    """What of this machine a job may use.

    Attributes:
        cores: their numbers; empty where jobs are more than cores, and the system shares them out.
        gpus: their names as in CUDA_VISIBLE_DEVICES; empty where there are none.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...]


class LocalLauncher(FrozenLauncher):
    """Runs `n_jobs` jobs at a time; a job that dies, however it does, does not end the others."""

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Refuse jobs of more processes than there are GPUs.

        Raises:
            ConfigError: with the first of them.
        """
        gpus = visible_gpus()
        for config in configs:
            if gpus and (nproc := config.distributed.nproc_per_node) > len(gpus):
                message = f"is {nproc} but {len(gpus)} GPUs are visible here"
                raise ConfigError(Violation("distributed.nproc_per_node", message))

    def run(self, jobs: Sequence[ComposedJob]) -> None:
        """Run the jobs to their ends, or until a signal comes: then each saves and stops, and none starts any more.

        Raises:
            KeyboardInterrupt: Ctrl-C came; a second one killed what was still running.
            SystemExit: another signal came; its code is 128 + its number.
        """
        settings = resolve_launcher(self._master)
        assert isinstance(settings, Local)
        nproc = max(job.config.distributed.nproc_per_node for job in jobs)
        shares = divide(settings, nproc, sorted(os.sched_getaffinity(0)), visible_gpus(), len(jobs))
        say(f"{len(jobs)} jobs, {len(shares)} at a time")
        try:
            with _threads(shares, nproc):
                server = _start_server(jobs, self.work)
                with noted_signals() as noted:
                    _Pool(self.work, jobs, shares, server, noted).run()
            if noted:
                raise ended_by(noted[0])
        except (KeyboardInterrupt, SystemExit):
            say(f"the same command with hydra.sweep.dir={self._master.hydra.sweep.dir} resumes from there")
            raise


class _Pool:
    """Jobs that wait, and jobs that run."""

    def __init__(
        self,
        work: Callable[[Path], int],
        jobs: Sequence[ComposedJob],
        shares: Sequence[Share],
        server: ForkServerContext,
        noted: Sequence[signal.Signals],
    ) -> None:
        self._work = work
        self._waiting = deque(jobs)
        self._free = deque(shares)
        self._server = server
        self._noted = noted
        self._running: dict[ForkServerProcess, tuple[ComposedJob, Share]] = {}
        self._ledger = Ledger(jobs)
        self._stopping = False

    def run(self) -> None:
        """Until none waits and none runs."""
        while self._running or (self._waiting and not self._noted):
            while self._waiting and self._free and not self._noted:
                self._start(self._waiting.popleft(), self._free.popleft())
            wait([process.sentinel for process in self._running], _POLL_SECONDS)
            self._obey_signals()
            for process in [process for process in self._running if not process.is_alive()]:
                self._settle(process)

    def _start(self, job: ComposedJob, share: Share) -> None:
        write_status(job.run_dir, state="queued", reason="")
        process = self._server.Process(target=_be_job, args=(self._work, job.run_dir, share), name=str(job))
        process.start()
        self._running[process] = job, share
        self._ledger.note(job, "running")

    def _obey_signals(self) -> None:
        """Have jobs save and stop after a signal, whichever it is; kill them after a second Ctrl-C."""
        if self._noted and not self._stopping:
            self._stopping = True
            text = f"{len(self._running)} running, which save and stop, {len(self._waiting)} waiting"
            say(f"{self._noted[0].name}: {text}; a second Ctrl-C kills those that run")
            for process in self._running:
                process.terminate()
        if list(self._noted).count(signal.SIGINT) > 1:
            for process in self._running:
                process.kill()

    def _settle(self, process: ForkServerProcess) -> None:
        """Take the end of a job; of one that recorded none, what its exit code says."""
        job, share = self._running.pop(process)
        self._free.append(share)
        process.join()
        assert process.exitcode is not None
        state = read_status(job.run_dir).get("state")
        if self._stopping and state not in ("finished", "failed"):
            write_status(job.run_dir, state="stopped", reason=self._noted[0].name)
        elif state not in ("finished", "failed", "stopped"):
            write_status(job.run_dir, state="failed", reason=how_it_ended(process.exitcode))
        self._ledger.settled(job)
        process.close()


def divide(settings: Local, nproc: int, cores: Sequence[int], gpus: Sequence[str], num_jobs: int) -> list[Share]:
    """Cut this machine into shares, one for each job that runs at a time.

    Args:
        settings: how many are wanted.
        nproc: processes of a job; where there are GPUs, each takes one.
        cores: those that this process may use.
        gpus: those that are visible.
        num_jobs: more shares are not needed.
    """
    if settings.n_jobs is not None:
        wanted = settings.n_jobs
    else:
        wanted = len(gpus) // nproc if gpus else max(1, len(cores) // max(settings.cores_per_job, nproc))
    count = min(wanted, num_jobs)
    each, gpus_each = len(cores) // count, max(nproc, len(gpus) // count)
    return [
        Share(
            cores=tuple(cores[i * each : (i + 1) * each]),
            # Jobs share GPUs only where more of them were asked for than there is room for.
            gpus=tuple(gpus[(i * gpus_each + k) % len(gpus)] for k in range(gpus_each)) if gpus else (),
        )
        for i in range(count)
    ]


def _start_server(jobs: Iterable[ComposedJob], work: Callable[[Path], int]) -> ForkServerContext:
    """Start the process that jobs fork from, and wait until it has imported what they need.

    It is out of the reach of Ctrl-C, which would end it with a traceback; a launcher that ends while it waits ends it.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(sorted({work.__module__, *_modules(jobs)}))
    # Started here, because starting it lets SIGINT through again.
    resource_tracker.ensure_running()
    with interrupts_held():
        forkserver.ensure_running()
    first = server.Process()  # does nothing; there is no other sign of the server being ready
    first.start()
    first.join()
    return server


def _modules(jobs: Iterable[ComposedJob]) -> set[str]:
    """What the server imports: what every run does, and foundry's own parts that some job is made of."""
    modules = {"foundry.engine.train", *(module.__name__ for name in GROUPS for module in group_modules(name))}
    for job in jobs:
        # torch's optimizers import its compiler, whether they use it or not; foundry's do not.
        if not str(OmegaConf.select(job.config, "optimizer._target_")).startswith("foundry."):
            modules.add("torch._dynamo")
        targets = (OmegaConf.select(job.config, f"{group!s}._target_") for group in job.config)
        own = (place_of(str(target)) for target in targets if str(target).startswith("foundry."))
        modules |= {place.rpartition(".")[0] for place in own}
    return modules


def _threads(shares: Sequence[Share], nproc: int) -> AbstractContextManager[None]:
    """Have each process use its share of the cores: OpenMP reads its variables once, as the server loads torch."""
    return default_variables(
        {
            "OMP_NUM_THREADS": str(max(1, len(shares[0].cores) // nproc)),
            # As in `foundry.launch.start`: idle threads of one job should not spin away the time of another.
            "GOMP_SPINCOUNT": "10000",
            VARIABLE: "1",
        }
    )


def _be_job(work: Callable[[Path], int], run_dir: Path, share: Share) -> None:
    """In the process of a job: take its place on this machine, and work.

    SIGINT is still held back, as in the server. One from the terminal that came before this process had a session of
    its own is dropped: the launcher has it too, and says with SIGTERM what it means.
    """
    begin_session()
    _end_with_launcher()
    _print_to(run_dir / OUTPUT)
    if share.cores:
        os.sched_setaffinity(0, share.cores)
    if share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    sys.exit(work(run_dir))


def _print_to(path: Path) -> None:
    """Have what this process prints in a file; where that is no regular file, where the launcher prints."""
    try:
        with open_regular(path, "ab", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    except OSError as error:
        say(f"what the job prints is here: {error}")


def _end_with_launcher() -> None:
    """Have this process get SIGTERM when the launcher is gone; the server outlives it as long as there are jobs."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watches the launcher", daemon=True).start()
