"""Rehearsals for tests, each in a process forked from one that has loaded the device guard and imported everything."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from foundry.config.frozen import save_config
from foundry.rehearsal.exchange import Request, read_answer
from foundry.safe_path import environment_of_module
from support.composition import configure


class Rehearsals:
    """Rehearses runs one after the other; `foundry.rehearsal.rehearsal.rehearse` starts a process for each."""

    def __init__(self, cache):
        self._folder = tempfile.TemporaryDirectory(prefix="foundry-rehearsals-")
        self._number = 0
        environment = environment_of_module() | {"FOUNDRY_CACHE": str(cache)}
        command = [sys.executable, "-m", "support.rehearsal_server"]
        self._server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(
        self,
        *overrides,
        world_size=8,
        ranks_per_node=8,
        steps=2,
        device="h100",
        run_dir=None,
        shortens=True,
        before=None,
    ):
        """Rehearse a run of these overrides.

        Args:
            overrides: of the command line.
            world_size: and the rest as of `rehearse`.
            before: `module:function`, called in the process of the rehearsal before it begins.
        """
        config = configure(*overrides, f"distributed.nproc_per_node={world_size}")
        return self.rehearse(
            config,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            steps=steps,
            device=device,
            run_dir=run_dir,
            shortens=shortens,
            before=before,
        )

    def rehearse(
        self,
        config,
        *,
        world_size=1,
        ranks_per_node=8,
        device="h100",
        steps=2,
        run_dir=None,
        shortens=True,
        before=None,
    ):
        """Rehearse a run; the arguments are those of `foundry.rehearsal.rehearsal.rehearse`, and `before`."""
        self._number += 1
        folder = Path(self._folder.name) / str(self._number)
        folder.mkdir()
        save_config(config, folder)
        request = Request(
            config_dir=str(folder),
            run_dir=str(run_dir or folder / "run"),
            world_size=world_size,
            ranks_per_node=min(ranks_per_node, world_size),
            device=device,
            steps=steps,
            shortens=shortens,
        )
        order = {"request": asdict(request), "path": str(folder / "answer.json"), "before": before}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        code = self._server.stdout.readline().strip()
        assert code == "0", f"the process of the rehearsal ended with {code or self._server.wait()}"
        return read_answer(json.loads((folder / "answer.json").read_text()))

    def close(self):
        self._server.stdin.close()
        self._server.wait(60)
        self._folder.cleanup()
