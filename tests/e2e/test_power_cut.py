"""Run directories with damaged files after a power cut, or with links, pipes and folders in place of files."""

import json
import os

import pytest
from support.tiny import TINY_LM

RUN = [*TINY_LM, "hparams.max_steps=3", "hydra.run.dir=run"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty", marks=pytest.mark.long),
        pytest.param(bytes(200), id="zeros", marks=pytest.mark.long),
        pytest.param(b'{"state": "fini', id="torn"),
        pytest.param(b'{"state": 5}', id="wrong", marks=pytest.mark.long),
    ],
)
def test_run_with_a_damaged_status_resumes_from_its_checkpoint(run_command, content):
    run_command(*RUN)
    before = json.loads((run_command.cwd / "run" / "result.json").read_text())
    (run_command.cwd / "run" / "status.json").write_bytes(content)
    _, err = run_command(*RUN)
    assert "status.json" in err
    assert "Traceback" not in err
    assert json.loads((run_command.cwd / "run" / "status.json").read_text())["state"] == "finished"
    assert json.loads((run_command.cwd / "run" / "result.json").read_text())["val_loss"] == before["val_loss"]


@pytest.mark.long
def test_sweep_with_an_empty_job_status_resumes(shell):
    sweep = ["-m", *TINY_LM, "hparams.max_steps=2", "hparams.seed=1,2", "hydra.sweep.dir=sweep"]
    shell.run(*sweep)
    (shell.cwd / "sweep" / "0" / "status.json").write_bytes(b"")
    out, _ = shell.run("dir=sweep", "picture=false", module="foundry.report", code=3)
    assert "1 finished, 1 unknown" in out
    shell.run(*sweep)
    out, _ = shell.run("dir=sweep", "picture=false", module="foundry.report")
    assert "2 finished" in out


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", ["foundry.log", ".lock", "config.yaml", ".hydra", ".hydra/config.yaml", "status.json", "plots"]
)
@pytest.mark.parametrize(
    "kind", ["link", pytest.param("pipe", marks=pytest.mark.long), pytest.param("folder", marks=pytest.mark.long)]
)
def test_run_neither_writes_through_links_nor_waits_for_pipes(shell, tmp_path, name, kind):
    run_dir, target = tmp_path / "run", tmp_path / "precious"
    target.mkdir() if name in ("plots", ".hydra") else target.write_text("precious")
    path = run_dir / name
    path.parent.mkdir(parents=True)
    (run_dir / ".foundry").write_text(
        "This directory is foundry's: files that foundry writes here may be replaced by it.\n"
    )
    if kind == "link":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    process = shell.start(*RUN, "tracking.mlflow=false")
    out, err = process.communicate(150)
    assert process.returncode in (0, 2), out + err
    assert "Traceback" not in err
    if process.returncode == 2:
        assert err.splitlines()[-1].startswith("hydra.run.dir: ")
    assert (list(target.iterdir()) == []) if target.is_dir() else (target.read_text() == "precious")
