"""Local sweeps, started by the command in an empty folder."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from support.small_text import SMALL

TINY_JOB = [
    "debug=fast",
    "data=arithmetic",
    "data.form=text",
    "data.num_rows=64",
    "data.seq_len=16",
    *SMALL,
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=4",
    "evaluation.interval=null",
    "evaluation.write_samples=false",
    "tracking.plots=false",
]
"""A small language model, because its processes import half as much as those of a diffusion model."""
TINY = [*TINY_JOB, "hydra.sweep.dir=s"]


class Sweeps:
    """Starts sweeps in a folder with one launcher, and inspects their jobs in the sweep directory `s`."""

    def __init__(self, cwd, *launcher):
        self.cwd, self.launcher = cwd, launcher
        self.drivers = []
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment["FOUNDRY_CACHE"] = str(cwd / "cache")

    def start(self, *overrides):
        with (self.cwd / "said.txt").open("w") as message:
            self.drivers.append(
                driver := subprocess.Popen(
                    [sys.executable, "-m", "foundry", "-m", *TINY, *self.launcher, *overrides],
                    cwd=self.cwd,
                    env=self.environment,
                    stdout=message,
                    stderr=message,
                    start_new_session=True,
                )
            )
        return driver

    def close(self):
        """Kill the processes that a failed test has left."""
        for driver in self.drivers:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)

    def ctrl_c(self, driver):
        """Send SIGINT to every process in the driver's group, as a terminal does."""
        os.killpg(driver.pid, signal.SIGINT)

    @property
    def output(self):
        return (self.cwd / "said.txt").read_text()

    def finish(self, driver, code=0):
        driver.wait(300)
        assert driver.returncode == code, self.output

    def status(self, job):
        return json.loads((self.cwd / "s" / str(job) / "status.json").read_text())

    def wait(self, condition, seconds=240):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_steps(self, job, steps, seconds=240):
        path = self.cwd / "s" / str(job) / "metrics.jsonl"
        self.wait(lambda: path.is_file() and path.read_bytes().count(b"\n") >= steps, seconds)

    def process_of(self, job):
        """Return the pid of the process that trains in the run directory of a job."""
        lock = str(self.cwd / "s" / str(job) / ".lock")
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                if str(link.readlink()) == lock:
                    return int(link.parts[2])
        raise AssertionError(f"no process trains in {lock}")
