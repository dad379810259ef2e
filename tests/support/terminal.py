"""Commands of foundry in new processes, as in a terminal."""

import os
import subprocess
import sys

NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("SLURM", "MLFLOW", "PET_", "SM_", "OMPI_", "PMI_", "MPI_", "TORCHELASTIC_")


def passed_on():
    """Return the environment without variables of batch systems, launchers and MLflow."""
    return {k: v for k, v in os.environ.items() if k not in NOT_PASSED_ON and not k.startswith(_PREFIXES)}


class Shell:
    """Runs commands in an empty folder, with a cache shared by all tests, so that a tokenizer is trained once."""

    def __init__(self, cwd, cache):
        self.cwd = cwd
        self.environment = {**passed_on(), "FOUNDRY_CACHE": str(cache), "OMP_NUM_THREADS": "1"}

    def start(self, *overrides, module="foundry", variables=None, command=(sys.executable, "-m")):
        return subprocess.Popen(
            [*command, module, *overrides],
            cwd=self.cwd,
            env={**self.environment, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *overrides, code=0, **options):
        """Run a command to its end, expect an exit code, and return (stdout, stderr)."""
        process = self.start(*overrides, **options)
        try:
            stdout, stderr = process.communicate(timeout=240)
        finally:
            process.kill()
        assert process.returncode == code, f"exit code {process.returncode}\n{stdout}\n{stderr}"
        return stdout, stderr
