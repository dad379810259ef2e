"""`python -m foundry.scaling` of a real sweep over widths and steps."""

import json

import pytest
from support.tiny import TINY_LM

WORDS = [
    *TINY_LM,
    "tracking=none",
    "evaluation.write_samples=false",
    "hydra.sweep.dir=sweep",
    "evaluation.interval=null",
]


@pytest.mark.long
def test_scaling_law_of_a_real_sweep_predicts_a_job_that_it_has_not_seen(shell):
    shell.run("-m", *WORDS, "hparams.lr=3e-3", "model.hidden_size=16,32,64", "hparams.max_steps=10,30,90")
    words = ["dir=sweep", "hold_out=model.hidden_size=64", "predict=N=1M D=1M", "resamples=20"]
    stdout, stderr = shell.run(
        "dir=sweep", "predict=N=1M D=1M", "budgets=1e12", "resamples=20", module="foundry.scaling"
    )
    assert stderr == ""
    assert stdout.startswith("9 jobs: 9 fitted\n")
    facts = json.loads((shell.cwd / "sweep" / "scaling.json").read_text())
    by_width = {run["non_embedding_parameters"] for run in facts["runs"]}
    assert len(by_width) == 3
    for index, run in enumerate(facts["runs"]):
        result = json.loads((shell.cwd / "sweep" / str(index) / "result.json").read_text())
        plan = json.loads((shell.cwd / "sweep" / str(index) / "plan.json").read_text())
        assert (run["loss"], run["tokens"], run["total_parameters"]) == (
            result["val_loss"],
            result["tokens"],
            plan["parameters"],
        )
        assert abs(run["residual"]) < 0.1
    stdout, _ = shell.run("dir=sweep", "hold_out=8", "resamples=20", "--json", module="foundry.scaling")
    (held_out,) = json.loads(stdout)["held_out"]
    assert held_out["job"] == 8
    assert abs(held_out["error"]) < 0.2
    _, stderr = shell.run(*words, module="foundry.scaling", code=2)
    assert "have 2 values of N" in stderr
