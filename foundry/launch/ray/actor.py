"""Actor of one rank of a Ray job. Ray imports this module in a process on the node where the rank runs.

The rank runs in a separate process (`rank.py`), so that signals, the exit code and the CUDA context belong to the run.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foundry import __version__
from foundry.core.exit_codes import code_of_signal
from foundry.core.safe_path import VARIABLE
from foundry.run_dir.files import open_regular, read_tail
from foundry.run_dir.names import RAY

_WATCH_SECONDS = 1.0
_VISIBLE_SECONDS = 10.0
"""Longest time until a file that another machine has written is visible here, as on NFS."""
_FIRST_PORT, _LAST_PORT = 10_000, 29_999  # below Linux's range for outgoing connections
_OTHER_LAUNCHERS = ("SLURM_", "SUBMITIT_", "PET_", "TORCHELASTIC_")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Node of an actor.

    Attributes:
        host: address of the node in the cluster.
        port: a port that is free on the node.
        problem: why a rank cannot run there; empty if it can.
    """

    host: str
    port: int
    problem: str


class RankActor:
    """Starts, signals and waits for one rank."""

    def __init__(self) -> None:
        self._raylet = os.getppid()
        self._process: subprocess.Popen[bytes] | None = None
        self._was_stopped = False
        self._lock = threading.Lock()
        """Held to start and to stop the rank, because Ray may run these calls at the same time and in any order."""

    def locate(self, run_dir: str, token: str, folder: str, version: str) -> Place:
        """Return the node of this actor, after a check that a rank can run there.

        Args:
            run_dir: the run directory.
            token: content of the file that the command has written to the run directory.
            folder: working directory of the command.
            version: foundry's version in the command.
        """
        host = get_node_address()
        problem = ""
        if version != __version__:
            problem = f"node {host} has foundry {__version__} but the command has {version}; install the same version"
        elif not _is_visible(Path(run_dir), token):
            problem = f"node {host} does not see {run_dir}; set hydra.sweep.dir to storage that all nodes share"
        elif not Path(folder).is_dir():
            problem = f"node {host} has no folder {folder}; start the command in a folder that all nodes share"
        return Place(host=host, port=_free_port(), problem=problem)

    def run(self, module: str, run_dir: str, output: str, folder: str, variables: Mapping[str, str]) -> int | str:
        """Start the rank unless it has been started or stopped, and wait for its end.

        Args:
            module: module that executes the run of a run directory as `python -m MODULE RUN_DIR trust=true`.
            run_dir: the run directory.
            output: name of the rank's output file in the run directory.
            folder: working directory of the rank.
            variables: environment variables to add. CUDA_VISIBLE_DEVICES comes from this actor.

        Returns:
            The exit code, 128 + n for signal n. If Ray has died on this node, a text with the node's address.
        """
        with self._lock:
            if self._process is None and self._was_stopped:
                return code_of_signal(signal.SIGTERM)
            if self._process is None:
                self._process = _start(module, run_dir, output, folder, variables)
        while True:
            try:
                code = self._process.wait(_WATCH_SECONDS)
            except subprocess.TimeoutExpired:
                if not self._is_orphan():  # an actor may outlive Ray on its node, unknown to the cluster
                    continue
                self.stop()
                code = self._process.wait()
            return f"Ray has died on node {get_node_address()}" if self._is_orphan() else code

    def stop(self, *, kill: bool = False) -> None:
        """Send SIGTERM to the rank once, so that it saves and stops; or kill it and the processes that it started.

        A rank that has not been started does not start any more.
        """
        with self._lock:
            was_stopped, self._was_stopped = self._was_stopped, True
            if self._process is None or self._process.poll() is not None:
                return
            if kill:
                os.killpg(self._process.pid, signal.SIGKILL)
            elif not was_stopped:
                self._process.terminate()

    def _is_orphan(self) -> bool:
        """Return whether the raylet, Ray's process on this node that started the actor, has died."""
        return os.getppid() != self._raylet


def _start(
    module: str, run_dir: str, output: str, folder: str, variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start the process between this actor and the rank."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_OTHER_LAUNCHERS)
    }
    paths = [variables.get("PYTHONPATH"), inherited.get("PYTHONPATH")]
    environment = {**inherited, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths)), VARIABLE: "1"}
    with open_regular(Path(run_dir, output), "ab", buffering=0) as file:
        return subprocess.Popen(
            [sys.executable, "-m", "foundry.launch.ray.rank", module, run_dir],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            cwd=folder,
            env=environment,
            start_new_session=True,  # Ray kills the process group of an actor
        )


def get_node_address() -> str:
    """Return the address of this actor's node in the cluster."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _is_visible(run_dir: Path, token: str) -> bool:
    """Return whether this node sees the file that the command has written to the run directory."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while (is_missing := read_tail(run_dir / RAY) != token) and time.monotonic() < deadline:
        time.sleep(0.5)
    return not is_missing


def _free_port() -> int:
    """Return a port of this node that is free; the process group's store of rank 0 listens on it."""
    for port in random.sample(range(_FIRST_PORT, _LAST_PORT + 1), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")
