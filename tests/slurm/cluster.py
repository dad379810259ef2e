"""Helpers that start and inspect sweeps on a Slurm cluster from a folder."""

import json
import os
import pty
import select
import sqlite3
import subprocess
import sys
import time

from safetensors.torch import load_file
from support.tiny import SMALL_LM

TINY = [*SMALL_LM, "evaluation.interval=null", "evaluation.write_samples=false", "tracking.plots=false"]
SLURM = [
    "hydra/launcher=slurm",
    "hydra.launcher.timeout_min=5",
    "hydra.launcher.signal_delay_s=30",
    "hydra.sweep.dir=s",
]


OWN = """
import os
import time
from pathlib import Path

from foundry.objectives.next_token import NextToken


class Own(NextToken):
    def loss(self, model, microbatch):
        if Path("slow").exists():
            time.sleep(0.3)
        if os.environ.get("SLURM_PROCID") == "1" and Path(f"raise{os.environ.get('SLURM_ARRAY_TASK_ID')}").exists():
            raise ArithmeticError("the teacher has no answer")
        return super().loss(model, microbatch)
"""


class Terminal:
    """A command that runs in a pseudo-terminal."""

    def __init__(self, command, environment, cwd):
        self.output = ""
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.chdir(cwd)
            os.execve(command[0], command, environment)

    def type(self, keys):
        os.write(self._file, keys.encode())

    def wait_for(self, text, seconds=300):
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self._read(), self.output
            assert time.monotonic() < deadline, self.output

    def end(self):
        """Read the output to its end; return the exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self):
        """Read available output; return whether more may follow."""
        if not select.select([self._file], [], [], 0.1)[0]:
            return True
        try:
            new = os.read(self._file, 4096)
        except OSError:  # raised on Linux when the process has closed the terminal
            return False
        self.output += new.decode()
        return bool(new)


class Cluster:
    def __init__(self, environment, cwd):
        self.environment, self.cwd, self.drivers = environment, cwd, []

    def ask(self, *command):
        process = subprocess.run(
            command, env=self.environment, cwd=self.cwd, capture_output=True, text=True, check=False
        )
        return process.stdout

    def sweep(self, *overrides):
        """Start a sweep whose output goes into said.txt."""
        with (self.cwd / "said.txt").open("w") as message:
            driver = subprocess.Popen(
                self._command(*overrides),
                cwd=self.cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=message,
                stderr=message,
            )
        self.drivers.append(driver)
        return driver

    def sweep_at_terminal(self, *overrides):
        return Terminal(self._command(*overrides), self.environment, self.cwd)

    def _command(self, *overrides):
        flags = [word for word in overrides if word.startswith("-")]
        settings = [word for word in overrides if word not in flags]
        return [sys.executable, "-m", "foundry", "-m", *flags, *TINY, *settings]

    def own_objective(self, *, slow=True):
        """Write an objective whose loss takes 0.3 s while file `slow` exists; rank 1 of job n fails if `raise`n exists.

        Returns:
            The overrides that select the objective.
        """
        (self.cwd / "own" / "objective").mkdir(parents=True)
        (self.cwd / "own" / "objective" / "own.yaml").write_text("_target_: own_objective.Own\n")
        (self.cwd / "own_objective.py").write_text(OWN)
        self.environment = {**self.environment, "PYTHONPATH": str(self.cwd)}
        if slow:
            (self.cwd / "slow").touch()
        return ["--config-dir=own", "objective=own"]

    def report(self, sweep="s"):
        """Return the output of the report and its exit code."""
        command = [sys.executable, "-m", "foundry.report", f"dir={sweep}", "picture=false"]
        process = subprocess.run(
            command, env=self.environment, cwd=self.cwd, capture_output=True, text=True, timeout=300, check=False
        )
        return process.stdout, process.returncode

    def mlflow_runs(self):
        """Return name and status of each run in the folder's MLflow database."""
        with sqlite3.connect(self.cwd / "mlflow.db") as database:
            return sorted(database.execute("select name, status from runs").fetchall())

    @property
    def output(self):
        path = self.cwd / "said.txt"
        return path.read_text() if path.exists() else ""

    def finish(self, driver, code=0):
        driver.wait(300)
        assert driver.returncode == code, self.output

    def wait(self, condition, seconds=300, *, detached=False):
        """Wait until the condition holds; fail if the sweep ends before, unless it is detached."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output
            assert detached or self.drivers[-1].poll() is None, self.output
            time.sleep(0.1)

    def wait_for_steps(self, job, steps, *, detached=False):
        path = self.cwd / "s" / str(job) / "metrics.jsonl"
        self.wait(lambda: path.is_file() and path.read_bytes().count(b"\n") >= steps, detached=detached)

    def slurm_id(self, job, sweep="s"):
        return json.loads((self.cwd / sweep / str(job) / "slurm.json").read_text())["job_id"]

    def state_in_slurm(self, job, sweep="s"):
        message = self.ask("scontrol", "--oneliner", "show", "job", self.slurm_id(job, sweep))
        return dict(word.split("=", 1) for word in message.split() if "=" in word)

    def kill(self, job):
        """Kill a running job; repeat, since Slurm drops a signal that arrives before the job's script has started."""

        def ended():
            self.ask("scancel", "--signal=KILL", "--full", self.slurm_id(job))
            return self.state_in_slurm(job)["JobState"] != "RUNNING"

        self.wait(ended)

    def status(self, job, sweep="s"):
        status = json.loads((self.cwd / sweep / str(job) / "status.json").read_text())
        return status["state"], status["reason"]

    def next_job_id(self):
        """Submit a trivial job, and return its id: the next id of the cluster."""
        return int(self.ask("sbatch", "--parsable", "--wrap", "true").strip())


def weights(run_dir):
    folder = run_dir / "checkpoints" / "latest"
    return {
        f"{path.name}:{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_weights(first, second):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    assert len(first) > 10
    assert [name for name in first if not first[name].equal(second[name])] == []
