"""Modules that --help and a run's first step must not import; times are not tested, as they depend on the machine."""

import json
import subprocess
import sys

import pytest
from support.tiny import PLOTS, TINY_LM

from foundry.config.composition.hydra_versions import IS_1_3

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

_HELP = """
import sys
from foundry.commands.main import main
sys.argv = ["foundry", "--help"]
try:
    main()
finally:
    print("imported:", *sorted({not_for_help} & set(sys.modules)))
"""
NOT_FOR_HELP = LATER | {"numpy", "rich", "submitit", "torch"}
NOT_FOR_HELP |= {"importlib.metadata"} if IS_1_3 else set()  # Hydra 1.4 imports it
NOT_FOR_HELP |= {f"foundry.config.{name}" for name in ("check", "override_errors", "rules", "targets")}
NOT_FOR_HELP |= {f"foundry.launch.{name}" for name in ("launchers", "local_launcher", "slurm_launcher")}
NOT_FOR_HELP |= {f"foundry.sweeps.{name}" for name in ("compose_jobs", "search", "sweeper")}


def test_help_imports_no_rules_launchers_or_sweepers():
    code = _HELP.format(not_for_help=NOT_FOR_HELP)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("foundry trains models")
    assert done.stdout.splitlines()[-1] == "imported:"


@pytest.mark.long
def test_first_step_of_one_process_imports_no_compiler_sharding_or_matplotlib(tmp_path):
    overrides = [*TINY_LM, *PLOTS, "tracking.mlflow=true", "tracking.log_every_n_steps=1"]
    (tmp_path / "script.py").write_text(_RUN.format(later=LATER, overrides=overrides))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("at the ")]
    assert lines == ["at the first step:", "at the end: matplotlib"]
    is_sent = json.loads((tmp_path / "run" / "mlflow.json").read_text())["run_id"] is not None
    assert is_sent or (tmp_path / "run" / "mlflow_pending.jsonl").exists()  # the sending process may be too slow
