"""`python -m foundry.plan`: runs follow the plan; options, one-line refusals, and --help of all commands."""

import csv
import json

import pytest
from support.tiny import TINY_DIT, TINY_LM

FULL = ["hparams.max_steps=40", "hparams.global_batch_size=16", "hparams.per_gpu_batch_size=2"]
RAMP = "hparams.batch_ramp={start: 4, increment: 4, over_samples: 100}"
STAGES = "hparams.batch_schedule='0:8 100:12 240:16'"
WSD = ["scheduler=wsd", "scheduler.decay=10", "scheduler.start_weight_decay=0.01", "scheduler.end_weight_decay=0.1"]


def read(path):
    return json.loads(path.read_text())


def rows(run_dir):
    with (run_dir / "schedule.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def logged(run_dir):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "samples", "global_batch_size", "lr", "weight_decay")
    return [{name: record[name] for name in names} for record in records if "loss" in record]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([*TINY_LM, *FULL], id="constant batch, cosine", marks=pytest.mark.long),
        pytest.param(
            [*TINY_LM, *FULL, RAMP, *WSD, "scheduler.weight_decay_incr_style=cosine"],
            id="ramp, wsd, rising weight decay",
        ),
        pytest.param(
            [*TINY_DIT, *FULL, STAGES, "scheduler=linear", "scheduler.evaluate_at=start"],
            id="batch schedule, linear, read at the start",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [*TINY_LM, *FULL, "hparams.batch_ramp={start: 8, increment: 8, over_samples: 160}", "distributed=fsdp",
             "distributed.nproc_per_node=2", "scheduler=inverse_square_root"],
            id="two processes, ramp, inverse square root",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_run_logs_the_planned_schedule_row_by_row(shell, run_command, overrides):
    logging = ["tracking.log_every_n_steps=1", "tracking.mlflow=false", "evaluation.write_samples=false"]
    overrides = [*overrides, "hparams.per_gpu_batch_size=4", *logging]
    run_command(*overrides, "hydra.run.dir=plan", module="foundry.plan")
    shell.run(*overrides, "hydra.run.dir=run")
    planned = rows(shell.cwd / "plan")
    assert len(planned) == 40
    assert logged(shell.cwd / "run") == planned
    plan, ran = read(shell.cwd / "plan" / "plan.json"), read(shell.cwd / "run" / "plan.json")
    assert {name: plan[name] for name in ran} == ran
    assert planned[-1]["samples"] == ran["total_samples"] == sum(row["global_batch_size"] for row in planned)


@pytest.mark.long
def test_plan_every_thins_rows_and_plan_measured_estimates_the_run_length(run_command, lm):
    run_dir, _, _ = lm
    overrides = [*TINY_LM, *FULL, "plan.every=8", f"plan.measured={run_dir}", "hydra.run.dir=plan"]
    stdout, _ = run_command(*overrides, module="foundry.plan")
    assert [row["step"] for row in rows(run_command.cwd / "plan")] == [8, 16, 24, 32, 40]
    plan = read(run_command.cwd / "plan" / "plan.json")
    assert plan["run_seconds"] == plan["step_seconds"] * 40 > 0
    assert (run_command.cwd / "plan" / "schedule.png").read_bytes().startswith(b"\x89PNG\r\n")
    for message in (
        "run length",
        "samples per step",
        "2 per rank x 1 rank x 8 accumulated = 16",
        "activations (estimate)",
    ):
        assert message in stdout
    assert "1.0 = 40 steps = 640 samples" in stdout
    assert not (run_command.cwd / "plan" / "status.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.evry=2"], "plan.evry: is not an option; did you mean every?"),
        (["plan.every=0"], "plan.every: is 0 but must be at least 1"),
        (["every=0"], "plan.every: is 0 but must be at least 1"),
        (["hparams.lr=-1"], "hparams.lr: is -1 but must be above 0"),
        (
            ["plan.measured=.", "hydra.run.dir=plan"],
            "plan.measured: is {cwd}, whose metrics.jsonl has fewer than two logged steps; choose another run\n",
        ),
    ],
)
def test_plan_refuses_config_errors_without_a_traceback(run_command, overrides, message):
    _, stderr = run_command(*TINY_LM, *overrides, module="foundry.plan", code=2)
    assert message.format(cwd=run_command.cwd) in stderr
    assert "Traceback" not in stderr
    assert list(run_command.cwd.iterdir()) == []


def test_plan_never_overwrites_a_run(lm, run_command):
    run_dir, _, _ = lm
    before = (run_dir / "plan.json").read_text()
    _, stderr = run_command(*TINY_LM, f"hydra.run.dir={run_dir}", module="foundry.plan", code=2)
    assert "hydra.run.dir: is " in stderr
    assert (run_dir / "plan.json").read_text() == before


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("plan", ["plan.every", "plan.device_gib"]),
        ("lr_find", ["lr_find.min", "lr_find.steps"]),
        ("eval", ["run", "max_samples"]),
        ("export", ["out", "dtype"]),
        ("sample", ["prompt", "labels"]),
        ("report", ["dir", "watch"]),
        ("scaling", ["dir", "predict", "hold_out"]),
        ("diff", ["run", "against", "picture"]),
        ("sync", ["dir", "uri"]),
    ],
)
def test_help_of_every_command_lists_its_options(run_command, command, options):
    out, err = run_command("--help", module=f"foundry.{command}")
    assert err == ""
    assert out.startswith(
        f"foundry {command} key=value ... [--json]\npython -m foundry.{command} key=value ... [--json]\n"
    )
    assert set(options) <= {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert max(map(len, out.splitlines())) <= 120
    assert run_command("--version", module=f"foundry.{command}") == run_command("--version")
    assert list(run_command.cwd.iterdir()) == []
