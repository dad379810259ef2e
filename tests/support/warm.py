"""Commands of `terminal.Shell` in forks of a process that has imported everything, so that they start at once.

The ranks of a run and the jobs of `hydra/launcher=local` fork from the process of the command. Tests of the process
start (imports, torchrun, kills of a whole process tree) need `terminal.Shell`; so do tests that kill the command of a
sweep, because forked jobs do not notice its end.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from unittest.mock import patch

from foundry.launch import local, local_launcher
from support.composition import OWN_OPTIONS, share_compositions
from support.terminal import NOT_PASSED_ON

CONTEXT = multiprocessing.get_context("forkserver")


def start_server():
    """Start the fork server unless it runs; it imports `support.warm_server`."""
    CONTEXT.set_forkserver_preload(["support.warm_server"])  # a process-wide setting that other code may have changed
    own_path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    # With NVML, imports that look for GPUs do not initialize CUDA, which a forked process could not use then.
    with patch.dict(os.environ, PYTHONPATH=own_path, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        forkserver.ensure_running()


class WarmProcess:
    """A process of a `WarmShell`, with the interface of `subprocess.Popen`; its output is in two files."""

    def __init__(self, process, stem):
        self._process, self._stem, self.pid = process, stem, process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout, *self.outputs())
        return self.returncode

    def outputs(self):
        """Return (stdout, stderr) so far."""
        return tuple(self._stem.with_suffix(suffix).read_text() for suffix in (".out", ".err"))

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.outputs()

    @property
    def stdout(self):
        """Lines of stdout as the process writes them."""
        with self._stem.with_suffix(".out").open() as file:
            rest = ""
            while True:
                ended = self.poll() is not None
                rest += (new := file.readline())
                if rest.endswith("\n"):
                    yield rest
                    rest = ""
                elif not new:
                    if ended:
                        return
                    time.sleep(0.005)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self._process.kill()


class WarmShell:
    """Runs commands in a folder, each in a fork of the server.

    `variables` are set for each command, such as PYTHONPATH=. for custom parts in the folder.
    """

    def __init__(self, cwd, cache, variables=None):
        self.cwd, self.cache, self.variables, self._number = cwd, cache, variables or {}, 0
        self._outputs = tempfile.TemporaryDirectory(prefix="foundry-warm-", ignore_cleanup_errors=True)

    def start(self, *overrides, module="foundry", variables=None):
        """Start `python -m <module> <overrides>` in a fork of the server."""
        self._number += 1
        stem = Path(self._outputs.name) / str(self._number)
        for suffix in (".out", ".err"):
            stem.with_suffix(suffix).touch()
        environment = {"FOUNDRY_CACHE": str(self.cache), **self.variables, **(variables or {})}
        start_server()
        process = CONTEXT.Process(target=_be, args=(module, overrides, self.cwd, stem, environment, self.cache))
        process.start()
        return WarmProcess(process, stem)

    def finish(self, process, code=0, seconds=240):
        """Wait for the exit, assert the exit code, and return (stdout, stderr)."""
        try:
            out, err = process.communicate(seconds)
        finally:
            process.kill()
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return out, err

    def run(self, *overrides, code=0, **options):
        """Run a command to its end, assert the exit code, and return (stdout, stderr)."""
        return self.finish(self.start(*overrides, **options), code)

    def wait_for_steps(self, process, run_dir, steps):
        """Wait until metrics.jsonl of the run has at least `steps` lines."""
        path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
        while not path.is_file() or path.read_bytes().count(b"\n") < steps:
            assert process.poll() is None, process.outputs()
            assert time.monotonic() < deadline
            time.sleep(0.002)


def _be(module, overrides, cwd, stem, environment, cache):
    for number, suffix in ((1, ".out"), (2, ".err")):
        with stem.with_suffix(suffix).open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)
    for name in [name for name in os.environ if name in NOT_PASSED_ON or name.startswith(("SLURM", "MLFLOW", "GLOO"))]:
        del os.environ[name]
    os.environ |= environment
    if not any(word.startswith(OWN_OPTIONS) for word in overrides):
        share_compositions(cache)
    become(module, overrides, cwd, environment.get("PYTHONPATH", ""))


def become(module, overrides, cwd, python_path):
    """Run `python -m <module> <overrides>` in this forked process, which has the environment of the command."""
    os.chdir(cwd)
    sys.argv = [module, *overrides]
    # As in `python -m`, user folders precede installed packages; Python's import caches are invalidated.
    entries = [str(Path(path).absolute()) for path in python_path.split(os.pathsep) if path]
    sys.path[:0] = entries if os.environ.get("PYTHONSAFEPATH") else [str(Path.cwd()), *entries]
    importlib.invalidate_caches()
    local.START = _Ranks()
    local_launcher._start_server = lambda configs, work: _Ranks()
    if module != "foundry":
        sys.modules.pop(module, None)  # runpy warns if it is imported already
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def warm_ranks():
    """Make the ranks of `run_local` fork from the server."""
    start_server()
    before, local.START = local.START, CONTEXT
    try:
        yield
    finally:
        local.START = before


class _Rank(ForkProcess):
    """A process with the signal dispositions of a new process."""

    def run(self):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        super().run()


class _Ranks(ForkContext):
    Process = _Rank
