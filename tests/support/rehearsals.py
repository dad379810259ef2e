"""Rehearsals for tests, each in a fork of a server that has loaded the device guard and all imports."""

import json
import subprocess
import sys
from dataclasses import asdict

from foundry.core.safe_path import environment_of_module
from foundry.rehearsal.rehearsal import rehearse
from support.composition import configure


class Rehearsals:
    """Rehearses runs one at a time in forks; `foundry.rehearsal.rehearsal.rehearse` starts a new process for each."""

    def __init__(self, cache):
        environment = environment_of_module() | {"FOUNDRY_CACHE": str(cache)}
        command = [sys.executable, "-m", "support.rehearsal_server"]
        self._server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, *overrides, world_size=8, **options):
        """Rehearse a run with these overrides.

        Args:
            overrides: command-line overrides.
            world_size: number of ranks.
            options: options of `rehearse`.
        """
        config = configure(*overrides, f"distributed.nproc_per_node={world_size}")
        return self.rehearse(config, world_size=world_size, **options)

    def rehearse(self, config, *, before=None, **options):
        """Rehearse a run.

        Args:
            config: config of the run.
            before: `module:function`, called in the rehearsal process before the rehearsal.
            options: options of `foundry.rehearsal.rehearsal.rehearse`.
        """

        def send(request, folder):
            path = folder / "answer.json"
            order = {"request": asdict(request), "path": str(path), "before": before}
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            code = self._server.stdout.readline().strip()
            assert code == "0", f"the process of the rehearsal ended with {code or self._server.wait()}"
            return json.loads(path.read_text())

        return rehearse(config, send=send, **options)

    def close(self):
        self._server.stdin.close()
        self._server.wait(60)
