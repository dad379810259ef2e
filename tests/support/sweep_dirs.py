"""Sweep directories, written by the observers of runs."""

import json
import subprocess
import sys
from contextlib import contextmanager

import yaml

from foundry.run_dir.lock import LOCK
from foundry.run_dir.rung import Rung
from foundry.tracking.metrics_file import MetricsFile
from foundry.tracking.status_file import StatusFile


class SweepDir:
    """A sweep in a folder; `events(run_dir)` creates the events of a run."""

    def __init__(self, folder, events, **facts):
        self.folder, self.events = folder, events
        self.facts = {"command": ["-m"], "created": "2026-01-01T00:00:00.000+00:00", "metric": "val_loss"}
        self.facts |= {"direction": "minimize", "launcher": "basic", "jobs": [], **facts}
        folder.mkdir()

    def job(self, *overrides, state="finished", losses=(3.0, 2.0), reason="", step=200, shared=()):
        """Add a job in the given state, with evaluations, and return its run directory."""
        index = len(self.facts["jobs"])
        run_dir = self.folder / str(index)
        entry = {"index": index, "dir": str(index), "overrides": overrides, "config_hash": "c0ffee", "id": str(index)}
        self.facts["jobs"].append(entry)
        (self.folder / "sweep.json").write_text(json.dumps(self.facts))
        if state != "queued":
            self._run(run_dir, state, losses, reason, step)
            (run_dir / ".hydra").mkdir()
            (run_dir / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([*shared, *overrides]))
        return run_dir

    def prune(self, run_dir):
        """Mark a finished job as pruned by a search."""
        path = run_dir / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pruned": "pruned: val_loss 9 at 25% of the run"}))

    def set_rung(self, run_dir, number):
        """Set the rung where a job pauses."""
        Rung(number=number, at=f"{number} steps", metric="val_loss").save(run_dir)

    def add_interval(self, run_dir, *ends):
        """Add a confidence interval of the loss to the evaluations and the result of a finished job."""
        for end, values in zip(("low", "high"), zip(*ends, strict=True), strict=True):
            records = (run_dir / "metrics.jsonl").read_text().splitlines()
            losses = iter(values)
            contents = [json.loads(record) for record in records]
            contents = [
                content | ({f"val_loss_{end}": next(losses)} if "val_loss" in content else {}) for content in contents
            ]
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(content) + "\n" for content in contents))
            path = run_dir / "result.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {f"val_loss_{end}": values[-1]}))

    def _run(self, run_dir, state, losses, reason, step):
        events = self.events(run_dir)
        observers = [MetricsFile(run_dir=run_dir), StatusFile(run_dir=run_dir, seconds_between_updates=0.0)]

        def tell(method, event):
            for observer in observers:
                getattr(observer, method)(event)

        tell("on_start", events.start())
        (run_dir / "plan.json").write_text(json.dumps({"total_steps": 200}))
        (run_dir / "foundry.log").write_text("one\nthe last line\n")
        for number, loss in enumerate(losses, start=1):
            at = step * number // len(losses)
            tell("on_step", events.step(at, loss=loss + 0.5))
            tell("on_evaluation", events.evaluation(at, val_loss=loss))
        if state == "finished":
            best = {"step": step, "val_loss": min(losses)}
            result = {"status": state, "step": step, "loss": losses[-1] + 0.5, "val_loss": losses[-1], "best": best}
            tell("on_end", events.end(result=result))
        elif state != "running":
            tell("on_end", events.end(state=state, reason=reason, result={}))


_HOLDER = """
import fcntl, socket, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(sys.argv[2] or socket.gethostname())
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def hold_lock(run_dir, host=""):
    """Hold the lock of a run directory in another process, as a training run does."""
    run_dir.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _HOLDER, str(run_dir / LOCK), host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.stdin.close()
