"""The terminal, status.json, foundry.log and torchrun's error file name the true cause of the end of a failed run."""

import json
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
from support.tiny import TINY_LM
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

WORDS = [
    "--config-dir=conf",
    *[word for word in TINY_LM if not word.startswith("objective")],
    "objective=faulty",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=4",
    "hparams.max_steps=40",
    "evaluation.interval=null",
    "evaluation.write_samples=false",
    "checkpoint.interval=null",
    "tracking.mlflow=false",
    "tracking.plots=false",
    "hydra.run.dir=run",
]
TWO = ["distributed=ddp", "distributed.nproc_per_node=2"]
WORKER = r"DataWorkerError: a data loader worker \(process \d+\) was killed by SIGKILL: out of memory\?.*num_workers"
MEMORY = r"OutOfMemoryError: out of CPU memory in step 2 on rank 0: 4\.00 PiB more were requested"
STALLED = r"rank 0 has made no progress for \d+ s \(distributed.timeout_seconds=10\), at step \d, training"
SILENT = (
    r"rank {} gave no sign of life \(stopped, busy, or unreachable\); rank {} waited for \d+ s .* at step \d, training"
)


@pytest.fixture
def faulty(shell):
    """A function that starts a run with a fault and returns the process."""
    folder = shell.cwd / "conf" / "objective"
    folder.mkdir(parents=True)
    (folder / "faulty.yaml").write_text("_target_: support.faulty.Objective\n")

    def start(fault, rank, *overrides, **variables):
        own = {"FAULT": fault, "FAULTY_RANK": str(rank), **variables}
        own["PYTHONPATH"] = str(Path(__file__).parents[1])
        own["TORCHELASTIC_ERROR_FILE"] = str(shell.cwd / "error.json")
        return shell.start(*WORDS, "distributed.timeout_seconds=10", *overrides, variables=own)

    return start


def reported(shell, code):
    """Return the message in the error file, and the summary that torchrun would print; both are read by torch."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(shell.cwd / "error.json"))
    details = json.loads((shell.cwd / "error.json").read_text())["message"]
    assert details["errorCode"] == details["extraInfo"]["exit_code"] == code
    assert abs(failure.timestamp - time.time()) < 600
    return failure.message, str(ChildFailedError("foundry", {0: failure}))


def status(shell):
    return json.loads((shell.cwd / "run" / "status.json").read_text())


@pytest.mark.parametrize(
    ("fault", "overrides", "code", "reason", "in_log"),
    [
        ("fail", [], 1, "ValueError: first line$", "in fail"),
        ("ask_for_memory", [], 1, MEMORY, "in ask_for_memory"),
        pytest.param(
            "kill_a_data_worker", ["data.num_workers=1"], 1, WORKER, "DataWorkerError", marks=pytest.mark.long
        ),
        pytest.param("leave", [], 1, r"RuntimeError: sys\.exit\(0\) was called", "in leave", marks=pytest.mark.long),
        pytest.param("hang", [], 74, STALLED, "in hang", marks=pytest.mark.long),  # takes ten seconds
    ],
)
def test_failure_of_one_process_is_recorded_with_its_cause(faulty, shell, fault, overrides, code, reason, in_log):
    process = faulty(fault, 0, *overrides)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == code, stderr
    end = status(shell)
    assert end["state"] == "failed"
    assert re.match(reason, end["reason"]), end["reason"]
    log = (shell.cwd / "run" / "foundry.log").read_text()
    assert in_log in log
    assert end["reason"] in log
    assert end["reason"] in stderr
    assert "another rank" not in stderr + log
    message, summary = reported(shell, code)
    assert message["message"] == end["reason"]
    assert end["reason"] in summary
    assert in_log in summary  # the place in the code


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "rank", "code", "reason", "in_log"),
    [
        ("kill", 0, 75, r"rank 0 failed: killed by SIGKILL: out of memory\?", "rank 0 failed"),
        pytest.param("fail", 1, 1, "rank 1 failed: ValueError: first line$", "in fail", marks=pytest.mark.long),
        pytest.param("stop", 0, 74, SILENT.format(0, 1), "in loss|in backward|wait", marks=pytest.mark.long),
        pytest.param("stop", 1, 74, SILENT.format(1, 0), "in loss|in backward|wait", marks=pytest.mark.long),
    ],
)
def test_failure_of_one_of_two_ranks_is_recorded_with_its_cause(faulty, shell, fault, rank, code, reason, in_log):
    process = faulty(fault, rank, *TWO)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == code, stderr
    end = status(shell)
    assert end["state"] == "failed"
    assert re.match(reason, end["reason"]), end["reason"]
    log = (shell.cwd / "run" / "foundry.log").read_text()
    assert re.search(in_log, log)
    # A waiting rank requests flight recordings; each rank that still responds writes the collectives it has begun.
    waited = {f"rank_{1 - rank}"} if fault == "stop" else set()
    assert {path.name for path in shell.cwd.glob("run/flight_recorder/*")} == waited
    assert end["reason"] in log
    assert end["reason"] in stderr
    message, _ = reported(shell, code)
    assert (message["message"], message["extraInfo"]["rank"]) == (end["reason"], rank)


def test_error_file_of_a_refused_command_has_its_violations_and_no_traceback(shell):
    process = shell.start("hparams.lr=-1", "hparams.seed=-1", variables={"TORCHELASTIC_ERROR_FILE": "error.json"})
    stderr = process.communicate(timeout=240)[1]
    message, summary = reported(shell, process.returncode)
    assert process.returncode == 2
    assert message["message"] == "; ".join(stderr.splitlines())
    assert message["message"] in summary
    assert "Traceback" not in summary


def test_error_file_of_a_stopped_run_names_signal_and_checkpoint(faulty, shell):
    process = faulty("terminate", 0, "checkpoint.interval=10")
    stderr = process.communicate(timeout=240)[1]
    assert process.returncode == 143, stderr
    message, summary = reported(shell, 143)
    assert re.fullmatch(r"stopped by SIGTERM after step 2; the checkpoint is .*/step_00000002", message["message"])
    assert message["message"] in summary


@pytest.mark.long
@pytest.mark.distributed
def test_surviving_rank_records_the_failure_if_rank_zero_is_killed(faulty, shell):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [faulty("kill", 0, "distributed=ddp", **place, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    message = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-9, 75], message
    end = status(shell)
    assert end["state"] == "failed"
    assert end["reason"].startswith("rank 0 has ended, perhaps killed; rank 1, step ")


def losses(shell):
    lines = [json.loads(line) for line in (shell.cwd / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.distributed
def test_max_restarts_resumes_bit_for_bit_after_a_rank_was_killed(faulty, shell):
    words = [
        *TWO,
        "hparams.max_steps=6",
        "tracking.log_every_n_steps=1",
        "checkpoint.interval=2",
        "checkpoint.asynchronous=false",
        "distributed.max_restarts=2",
    ]
    process = faulty("kill_once", 1, *words)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    end, found = status(shell), losses(shell)
    assert end["state"] == "finished"
    assert end["restarts"] == ["rank 1 failed: killed by SIGKILL: out of memory?"]
    log = (shell.cwd / "run" / "foundry.log").read_text()
    assert "out of memory?; restart 1 of 2, from the checkpoint of step 2" in log
    assert (shell.cwd / "killed").exists()
    process = faulty("nothing", 1, *words, "hydra.run.dir=undisturbed")
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    shutil.rmtree(shell.cwd / "run")
    (shell.cwd / "undisturbed").rename(shell.cwd / "run")
    assert "restarts" not in status(shell)
    assert losses(shell) == found  # all six losses are bit-identical
    assert len(found) == 6
