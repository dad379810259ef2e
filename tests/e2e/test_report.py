"""`python -m foundry.report` of a real sweep."""

import csv
import json

from support.tiny import TINY_LM

WORDS = [*TINY_LM, "hparams.max_steps=3", "tracking=none", "evaluation.write_samples=false", "hydra.sweep.dir=sweep"]


def test_report_ranks_jobs_and_its_repeat_command_reproduces_the_best(shell):
    shell.run("-m", *WORDS, "hparams.lr=1e-3,2e-3,3e-3")
    folder = shell.cwd / "sweep"
    stdout, stderr = shell.run("dir=sweep", module="foundry.report")
    assert stderr == ""
    lines = stdout.splitlines()
    assert lines[0].split()[:3] == ["job", "lr", "state"]
    results = [json.loads((folder / str(number) / "result.json").read_text()) for number in range(3)]
    order = sorted(range(3), key=lambda number: results[number]["val_loss"])
    assert [int(line.split()[0]) for line in lines[1:4]] == order
    assert "3 jobs: 3 finished" in lines
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG\r\n")
    with (folder / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["hparams.lr"]) for row in rows] == [(1 + number) * 1e-3 for number in order]
    assert [float(row["val_loss"]) for row in rows] == [results[number]["val_loss"] for number in order]

    repeat = json.loads((folder / "report.json").read_text())["repeat"].split()
    assert repeat[:3] == ["python", "-m", "foundry"]
    shell.run(*repeat[3:], "hydra.run.dir=again")
    again = json.loads((shell.cwd / "again" / "result.json").read_text())
    assert again["val_loss"] == results[order[0]]["val_loss"]
    assert again["config_hash"] == results[order[0]]["config_hash"]

    (folder / "sweep.json").unlink()
    assert shell.run("dir=sweep", "picture=false", module="foundry.report")[0].splitlines()[:4] == lines[:4]
