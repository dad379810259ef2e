"""Sweeps on a running cluster, as somebody sees them who works in a folder of theirs."""

import json
import subprocess
import sys
import time

TINY = [
    "debug=fast",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "data.seq_len=32",
    "evaluation.interval=null",
    "evaluation.write_samples=false",
    "tracking.plots=false",
]
SLURM = [
    "hydra/launcher=slurm",
    "hydra.launcher.timeout_min=5",
    "hydra.launcher.signal_delay_s=30",
    "hydra.sweep.dir=s",
]


class Cluster:
    def __init__(self, environment, cwd):
        self.environment, self.cwd, self.drivers = environment, cwd, []

    def ask(self, *command):
        done = subprocess.run(command, env=self.environment, cwd=self.cwd, capture_output=True, text=True, check=False)
        return done.stdout

    def sweep(self, *words):
        """Start a sweep; what it says goes into said.txt."""
        with (self.cwd / "said.txt").open("w") as said:
            driver = subprocess.Popen(
                [sys.executable, "-m", "foundry", "-m", *sorted(words, key=lambda word: word[0] != "-"), *TINY],
                cwd=self.cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        self.drivers.append(driver)
        return driver

    @property
    def said(self):
        path = self.cwd / "said.txt"
        return path.read_text() if path.exists() else ""

    def finish(self, driver, code=0):
        driver.wait(150)
        assert driver.returncode == code, self.said

    def wait(self, condition, seconds=90):
        """Until the condition holds; fails if the sweep ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.said
            assert self.drivers[-1].poll() is None, self.said
            time.sleep(0.1)

    def wait_for_steps(self, job, steps):
        path = self.cwd / "s" / str(job) / "metrics.jsonl"
        self.wait(lambda: path.is_file() and path.read_bytes().count(b"\n") >= steps)

    def slurm_id(self, job):
        return json.loads((self.cwd / "s" / str(job) / "slurm.json").read_text())["job_id"]

    def state_in_slurm(self, job):
        said = self.ask("scontrol", "--oneliner", "show", "job", self.slurm_id(job))
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def status(self, job, sweep="s"):
        status = json.loads((self.cwd / sweep / str(job) / "status.json").read_text())
        return status["state"], status["reason"]

    def next_job_id(self):
        """The number that Slurm would give a job now."""
        return int(self.ask("sbatch", "--parsable", "--wrap", "true").strip())
