"""`hparams.max_minutes`: a run stops when its time is up and continues with a larger limit."""

import json

import pytest
from support.tiny import TINY_LM

RUN = [*TINY_LM, "precision=fp32", "tracking=none", "evaluation.write_samples=false", "evaluation.interval=null"]
RUN += ["hparams.max_steps=40", "hparams.global_batch_size=8", "hparams.per_gpu_batch_size=4", "checkpoint=default"]


def read(folder, name):
    return json.loads((folder / name).read_text())


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("layout", "starts"),
    [
        pytest.param([], "run_command", id="one"),
        pytest.param(["distributed=ddp", "distributed.nproc_per_node=2"], "shell", id="two", marks=pytest.mark.long),
    ],
)
def test_max_minutes_stops_the_run_and_a_larger_limit_resumes_it(request, layout, starts):
    command = request.getfixturevalue(starts)
    run = command.run if starts == "shell" else command
    words = [*RUN, *layout, "hydra.run.dir=run"]
    run(*words, "hparams.max_minutes=0.0001")
    folder = command.cwd / "run"
    result, status = read(folder, "result.json"), read(folder, "status.json")
    ended = result["step"]
    assert 1 <= ended < 40
    assert (status["state"], status["reason"]) == ("finished", "hparams.max_minutes is reached")
    assert (folder / "checkpoints" / f"step_{ended:08d}").is_dir()
    last = [record for record in records(folder) if "val_loss" in record][-1]
    assert (last["step"], last["val_loss"]) == (ended, result["val_loss"])

    kept = {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}
    run(*words, "hparams.max_minutes=0.0001")  # the run already has its result
    assert read(folder, "result.json") == result
    assert kept == {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}

    # The time of earlier starts counts: the limit ends the run after one more step, or two if ranks agree a step late.
    run(*words, "hparams.max_minutes=0.00010001")
    assert ended < read(folder, "result.json")["step"] <= ended + 2

    run(*words, "hparams.max_minutes=null")
    run(*RUN, *layout, "hydra.run.dir=whole")
    assert read(folder, "result.json")["step"] == 40
    whole = {record["step"]: record["loss"] for record in records(command.cwd / "whole") if "loss" in record}
    found = {record["step"]: record["loss"] for record in records(folder) if "loss" in record}
    assert found == whole


@pytest.mark.long
def test_max_minutes_beyond_the_end_of_the_run_has_no_effect(shell):
    shell.run(*RUN, "hparams.max_steps=4", "hparams.max_minutes=60", "hydra.run.dir=run")
    assert read(shell.cwd / "run", "status.json")["reason"] == ""
    assert read(shell.cwd / "run", "result.json")["step"] == 4
