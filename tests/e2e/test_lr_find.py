"""`python -m foundry.lr_find`: output, refusals and several processes."""

import json
import re

import pytest
from support.tiny import TINY_LM

FIND = ["hydra.run.dir=found", "lr_find.min=1e-4", "lr_find.max=10", "optimizer=adamw"]


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_lr_find_writes_plot_and_numbers_and_prints_an_override(run_command):
    stdout, stderr = run_command(*TINY_LM, *FIND, "lr_find.steps=40", module="foundry.lr_find")
    assert stderr == ""
    lr = re.search(r"^steepest fall  hparams\.lr=(\S+)$", stdout, re.MULTILINE)[1]
    run_dir = run_command.cwd / "found"
    numbers = json.loads((run_dir / "lr_find.json").read_text())
    assert float(lr) == pytest.approx(numbers["suggestion"], rel=0.05)
    assert 1e-3 < float(lr) < 1
    assert numbers["rates"][:2] == pytest.approx([1e-4, 1e-4 * 1e5 ** (1 / 39)])
    assert len(numbers["rates"]) == len(numbers["losses"]) <= 40
    assert (run_dir / "lr_find.png").read_bytes().startswith(b"\x89PNG")
    left = {path.name for path in run_dir.iterdir()} - {".hydra", ".foundry"}
    assert left == {"lr_find.json", "lr_find.png", "foundry.log"}
    assert [path.name for path in run_command.cwd.iterdir()] == ["found"]
    run_command(
        *TINY_LM, "optimizer=adamw", "hydra.run.dir=run", "hparams.lr=1e-4", "scheduler=constant", "hparams.max_steps=1"
    )
    first = json.loads((run_command.cwd / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert numbers["losses"][0] == first["loss"]
    before = content(run_command.cwd / "run")
    _, stderr = run_command(*TINY_LM, "hydra.run.dir=run", module="foundry.lr_find", code=2)
    assert stderr == f"hydra.run.dir: is {run_command.cwd}/run, which holds a run; choose another\n"
    assert before == content(run_command.cwd / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr_find.min=1"], "lr_find.min: is 1 but must be below max=1\n"),
        (["lr_find.steps=3"], "lr_find.steps: is 3 but must be at least 10\n"),
        (["lr_find.step=3"], "lr_find.step: is not an option; did you mean steps?"),
        (
            ["lr_find.max=1e-6", "lr_find.steps=20"],
            "lr_find.max: is 1e-06 but up to 1e-06 the loss does not fall by more than its noise; increase",
        ),
    ],
)
def test_lr_find_refuses_wrong_options_with_one_line(run_command, lm, overrides, message):
    # The fixture lm fills the cache before, since filling it prints progress to stderr.
    _, stderr = run_command(*TINY_LM, *overrides, "lr_find.stop_at=100", module="foundry.lr_find", code=2)
    assert stderr.startswith(message)
    assert stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.distributed
def test_lr_find_on_two_processes_matches_one_process(shell):
    words = [*TINY_LM, "precision=fp32", "optimizer=adamw", "lr_find.min=1e-4", "lr_find.max=0.1", "lr_find.steps=20"]
    shell.run(*words, "hydra.run.dir=one", module="foundry.lr_find")
    two = ["distributed=fsdp", "distributed.nproc_per_node=2", "hydra.run.dir=two"]
    shell.run(*words, *two, module="foundry.lr_find")
    one, other = (json.loads((shell.cwd / name / "lr_find.json").read_text()) for name in ("one", "two"))
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)
    assert one["suggestion"] == other["suggestion"]
