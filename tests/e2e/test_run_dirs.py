"""Directories that a command may write to; a refused command changes no files."""

import pytest
from support.examples import long_case
from support.tiny import TINY_LM
from test_runs import snapshot

OWN = ("config.yaml", "tokenizer.json", "plan.json", "foundry.log", ".lock", ".hydra/hydra.yaml", "data/a.txt")
WORDS = [*TINY_LM, "tracking=none", "evaluation.write_samples=false"]
REFUSED_BY_THE_DATA = "data.seq_len=1000000"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def mine(tmp_path):
    for name in OWN:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(f"my {name}")
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("module", "overrides", "key"),
    [
        ("foundry", ["hydra.run.dir=mine"], "hydra.run.dir"),
        ("foundry", ["hydra.run.dir=mine", REFUSED_BY_THE_DATA], "hydra.run.dir"),
        ("foundry.plan", ["hydra.run.dir=mine"], "hydra.run.dir"),
        ("foundry", ["-m", "hydra.sweep.dir=mine", "hparams.seed=1,2"], "hydra.sweep.dir"),
        long_case(
            "foundry", ["-m", "hydra.sweep.dir=s", "hydra.sweep.subdir=../mine", "hparams.seed=1"], "hydra.sweep.subdir"
        ),
        long_case(
            "foundry", ["-m", "hydra/launcher=local", "hydra.sweep.dir=mine", "hparams.seed=1,2"], "hydra.sweep.dir"
        ),
        long_case(
            "foundry", ["-m", "hydra/launcher=basic", "hydra.sweep.dir=mine", "hparams.seed=1"], "hydra.sweep.dir"
        ),
        ("foundry", ["hydra.run.dir="], "hydra.run.dir"),
        long_case("foundry", ["hydra.run.dir=mine/data/a.txt"], "hydra.run.dir"),
    ],
)
def test_folder_with_user_files_is_refused_as_run_dir_and_unchanged(run_command, mine, module, overrides, key):
    before, times = contents(run_command.cwd), snapshot(mine)
    _, err = run_command(*WORDS, *overrides, module=module, code=2)
    assert err.startswith(f"{key}: is "), err
    assert err.count("\n") == 1
    assert contents(run_command.cwd) == before
    assert snapshot(mine) == times


@pytest.mark.parametrize("module", ["foundry", "foundry.plan"])
def test_refused_command_leaves_no_new_files(run_command, mine, module):
    (run_command.cwd / "empty").mkdir()
    before = set(run_command.cwd.rglob("*"))
    for folder in ("empty", "new/er", "mine/data/run"):
        run_command(*WORDS, REFUSED_BY_THE_DATA, f"hydra.run.dir={folder}", module=module, code=2)
    assert set(run_command.cwd.rglob("*")) == before


def test_refused_command_leaves_a_run_unchanged(run_command):
    run_command(*WORDS, "hydra.run.dir=run")
    files = contents(run_command.cwd)
    before = {path: content for path, content in files.items() if path.name not in (".lock", ".foundry")}
    run_command(*WORDS, REFUSED_BY_THE_DATA, "hydra.run.dir=run", code=2)
    run_command(*WORDS, "hydra.run.dir=run", module="foundry.plan", code=2)
    after = contents(run_command.cwd)
    assert {path: after[path] for path in before} == before


@pytest.mark.long
def test_run_may_use_the_folder_of_its_plan(run_command):
    run_command(*WORDS, "hydra.run.dir=run", module="foundry.plan")
    run_command(*WORDS, "hydra.run.dir=run")
    assert (run_command.cwd / "run" / "result.json").is_file()
