"""`python -m support.rehearsal_server`: fork a process for each rehearsal request, one request per line of stdin."""

if __name__ == "__main__":
    from foundry.rehearsal.guard import load_guard

    load_guard()

import gc
import importlib
import json
import os
import sys
from pathlib import Path

from foundry.rehearsal.child import answer

MODULES = (
    "foundry.data.corpora.text",
    "foundry.evaluators.held_out",
    "foundry.models.transformer",
    "foundry.objectives.next_token",
    "foundry.optim.muon",
    "foundry.optim.optimizers",
    "foundry.optim.schedules",
    "torch.distributed.checkpoint",
)


def serve():
    """Fork a process for each line of stdin, wait for its end, and write its exit code to stdout."""
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            rehearse(**order)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def rehearse(request, path, before):
    """Rehearse a run; its output goes into a log file next to the result file."""
    answered = Path(path)
    with answered.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if before is not None:
        module, _, name = before.partition(":")
        getattr(importlib.import_module(module), name)()
    answered.write_text(json.dumps(answer(request)))
    os._exit(0)


if __name__ == "__main__":
    serve()
