"""Every command refuses to replace a file that it has not written, and leaves everything as it was."""

import hashlib
import shutil

import pytest
from support.tiny import TINY_LM

PROMPT = ["prompt=a", "max_new_tokens=2"]
HOLDS = "is a file that this command has not written; move that file"


@pytest.fixture
def folder(run_command, lm):
    """The folder of the commands, with a run and files of the user's."""
    shutil.copytree(lm[0], run_command.cwd / "run", symlinks=True)
    (run_command.cwd / "sweep").mkdir()
    shutil.copytree(lm[0], run_command.cwd / "sweep" / "0", symlinks=True)
    for name in ("thesis.txt", "mine.json", "curves.png", "full/mine", "sweep/report.csv", "plans/schedule.csv"):
        path = run_command.cwd / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("my own work")
    return run_command.cwd


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("foundry.eval", ["run=run", "out=run/config.yaml"], "out: is run/config.yaml, which exists; choose another"),
        ("foundry.eval", ["run=run", "out=thesis.txt"], "out: is thesis.txt, which exists; choose another"),
        ("foundry.eval", ["run=run", "out=run/checkpoints/x.json"], "out: is run/checkpoints/x.json, and checkpoints"),
        ("foundry.sample", ["run=run", *PROMPT, "out=thesis"], "out: is thesis but thesis.txt exists; choose another"),
        ("foundry.sample", ["run=run", *PROMPT, "out=run/checkpoints/x"], "out: is run/checkpoints/x, and checkpoints"),
        ("foundry.export", ["run=run", "out=full"], "out: is full, which exists and is not an empty folder; choose"),
        ("foundry.export", ["run=run", "out=run/checkpoints/x"], "out: is run/checkpoints/x, and checkpoints belongs"),
        (
            "foundry.diff",
            ["run=run", "against=run", "picture=curves.png"],
            "picture: is curves.png, which exists; choose",
        ),
        ("foundry.report", ["dir=sweep"], f"dir: is sweep, where report.csv {HOLDS}"),
        ("foundry.plan", [*TINY_LM, "hydra.run.dir=plans"], "which holds files of another origin, such as sch"),
    ],
)
def test_command_keeps_what_was_there(run_command, folder, module, words, message):
    before = contents(folder)
    _, stderr = run_command(*words, module=module, code=2)
    assert message in stderr
    assert stderr.count("\n") == 1
    assert contents(folder) == before


def test_measuring_a_folder_keeps_its_own_eval_json(run_command, folder):
    (folder / "run" / "eval.json").write_text("[]")
    _, stderr = run_command("run=run", "max_samples=1", module="foundry.eval", code=2)
    assert stderr == f"out: is run, where eval.json {HOLDS}\n"
    (folder / "run" / "eval.json").unlink()
    for _ in range(2):  # its own file is replaced
        run_command("run=run", "max_samples=1", module="foundry.eval")
