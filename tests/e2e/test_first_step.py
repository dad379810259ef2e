"""What a run has imported when it has taken its first step: counted, since seconds are the machine's."""

import json
import subprocess
import sys

import pytest
from tiny import TINY_LM

_RUN = """
import sys
from foundry import compose, run

class Look:
    def on_start(self, event):
        pass

    on_evaluation = on_end = on_start

    def on_step(self, event):
        if event.step == 1:
            print("at the first step:", *sorted({later} & set(sys.modules)))

if __name__ == "__main__":
    run(compose({overrides}), "run", observers=[Look()])
    print("at the end:", *sorted({later} & set(sys.modules)))
"""
LATER = {"matplotlib", "mlflow", "optuna", "pandas", "sympy", "torch._dynamo", "torch.distributed.checkpoint"}
LATER |= {"torch.distributed.fsdp", "torch.distributed.tensor", "transformers"}


@pytest.mark.long
def test_one_process_imports_neither_compiler_nor_sharding_and_draws_after_its_first_step(tmp_path):
    overrides = [*TINY_LM, "tracking.mlflow=true", "tracking.log_every_n_steps=1"]
    (tmp_path / "script.py").write_text(_RUN.format(later=LATER, overrides=overrides))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("at the ")]
    assert lines == ["at the first step:", "at the end: matplotlib"]
    is_sent = json.loads((tmp_path / "run" / "mlflow.json").read_text())["run_id"] is not None
    assert is_sent or (tmp_path / "run" / "mlflow_pending.jsonl").exists()  # by another process, if there was time
