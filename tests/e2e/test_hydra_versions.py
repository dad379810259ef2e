"""Commands behave the same with each supported version of Hydra: output, messages and exit codes.

`.ci/run` runs these tests again with Hydra 1.4.
"""

import json

import pytest
from support.tiny import TINY_DIT

TINY = [*TINY_DIT, "hparams.max_steps=2", "evaluation.interval=null", "tracking=none"]
REFUSAL = "which Hydra does not call from a configuration; write a function that calls it, and name that"
# (overrides, error lines)
REFUSED = [
    (["hparams.lrr=1"], ["hparams.lrr: is not a key of hparams; did you mean hparams.lr?"]),
    (["hparams.lr=abc"], ["hparams.lr: is abc but must be a number"]),
    (
        ["hparams.lr=[1"],
        ["hparams.lr=[1: is not of the form key=value; quote values with spaces, commas, = or special characters"],
    ),
    (["hparams.seed=1,2"], ["hparams.seed: is 1,2: to sweep over it add -m; for a list write [1,2]"]),
    (
        ["precision=bf15"],
        [
            "precision: has no option 'bf15' (options: amp, amp_bf16, amp_bfloat16, amp_float16, float32, fp32, "
            "pure_bf16)"
        ],
    ),
    (["hydra.mode=TRAIN"], ["hydra.mode: is TRAIN but must be one of RUN, MULTIRUN"]),
    (
        ["-m", "hparams.seed=1,2", "hparams.lrr=1", "hparams.wd=[1"],
        [
            "hparams.wd=[1: is not of the form key=value; quote values with spaces, commas, = or special characters",
            "hparams.lrr: is not a key of hparams; did you mean hparams.lr?",
        ],
    ),
    (["model._target_=os.system"], [f"model._target_: is os.system, {REFUSAL}"]),
    (
        ["+evaluation.evaluators.mine._target_=shutil.rmtree", "+evaluation.evaluators.mine.path=/"],
        [f"evaluation.evaluators.mine._target_: is shutil.rmtree, {REFUSAL}"],
    ),
    (
        ["-m", "hparams.seed=1,2", "hydra.sweeper._target_=os.system"],
        ["hydra.sweeper._target_: is os.system, which is not a sweeper; choose one with hydra/sweeper=..."],
    ),
    (
        ["-m", "hparams.seed=1,2", "hydra.launcher._target_=os.system"],
        ["hydra.launcher._target_: is os.system, which is not a launcher; choose one with hydra/launcher=..."],
    ),
    (["+hydra.job_logging.handlers.mine.class=os.system"], [f"hydra.job_logging: is os.system, {REFUSAL}"]),
]


@pytest.mark.parametrize(("overrides", "lines"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_refusal_has_the_same_lines_in_each_version(overrides, lines, run_command):
    stdout, stderr = run_command(*TINY, *overrides, code=2)
    assert (stdout, stderr.splitlines()) == ("", lines)
    assert not list(run_command.cwd.iterdir())


def test_composition_prints_no_warning(cold_shell):
    stdout, stderr = cold_shell.run("--cfg", "job", "hparams.seed=7")
    assert "seed: 7" in stdout
    assert stderr == ""


@pytest.mark.long
def test_run_and_its_continuation_print_no_warning(cold_shell, shell):
    _, stderr = cold_shell.run(*TINY, "hydra.run.dir=run")
    assert stderr == ""
    shell.run(*TINY, "hydra.run.dir=run", "hparams.max_steps=4", "checkpoint.scheduler_on_resume=config")
    assert json.loads((shell.cwd / "run" / "result.json").read_text())["step"] == 4


@pytest.mark.long
def test_sweep_of_two_jobs_prints_no_warning(cold_shell):
    stdout, stderr = cold_shell.run("-m", *TINY, "hparams.seed=1,2", "hydra.sweep.dir=sweep")
    assert stderr == ""
    assert "2 jobs: 2 finished" in stdout
    overrides = (cold_shell.cwd / "sweep" / "1" / ".hydra" / "overrides.yaml").read_text()
    assert "hparams.seed=2" in overrides
