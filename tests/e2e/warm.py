"""The same commands, in processes that fork from one that has imported everything, and so start at once."""

import multiprocessing
import os
import runpy
import sys
import time

from terminal import NOT_PASSED_ON

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["foundry.cli", "foundry.train", "foundry.export", "foundry.data.text"])


class WarmShell:
    """A folder, and commands that run there; what they say is in files."""

    def __init__(self, cwd, cache):
        self.cwd, self.cache, self._number = cwd, cache, 0

    def start(self, *words, module="foundry", variables=None):
        """Start `python -m <module> <words>`; returns the process, whose `said` is the stem of its output's files."""
        self._number += 1
        said = self.cwd / f"said-{self._number}"
        environment = {"FOUNDRY_CACHE": str(self.cache), **(variables or {})}
        process = _CONTEXT.Process(target=_be, args=(module, words, self.cwd, said, environment))
        process.start()
        process.said = said
        return process

    def finish(self, process, code=0, seconds=120):
        """Wait for the end, expect an exit code, and return (stdout, stderr)."""
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
        out, err = (process.said.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        assert process.exitcode == code, f"exit code {process.exitcode}\n{out}\n{err}"
        return out, err

    def run(self, *words, code=0, **options):
        """`start` and `finish`."""
        return self.finish(self.start(*words, **options), code)

    def wait_for_steps(self, process, run_dir, steps):
        """Wait until the run has logged so many more lines than it had."""
        path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 60
        while not path.is_file() or path.read_bytes().count(b"\n") < steps:
            assert process.exitcode is None, process.said.with_suffix(".err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)


def _be(module, words, cwd, said, environment):
    for number, suffix in ((1, ".out"), (2, ".err")):
        with said.with_suffix(suffix).open("w") as file:
            os.dup2(file.fileno(), number)
    for name in [name for name in os.environ if name in NOT_PASSED_ON or name.startswith(("SLURM", "MLFLOW"))]:
        del os.environ[name]
    os.environ |= environment
    os.chdir(cwd)
    sys.argv = [module, *words]
    sys.path.insert(0, str(cwd))  # as `python -m` does
    runpy.run_module(module, run_name="__main__", alter_sys=True)
