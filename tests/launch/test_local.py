import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_workers import (
    all_reduce,
    configuration_mistake,
    die_silently,
    exit_early,
    fail_and_say_whether_the_group_is_left,
    fail_on_rank_one,
    fail_with_exit_handlers,
    stop_after_signal,
    stop_and_be_asked_again,
)
from support.examples import long_case, some_of

from foundry.core.errors import ConfigError, Violation
from foundry.core.exit_codes import ExitCode
from foundry.core.stop_signals import Stopped
from foundry.launch import local
from foundry.launch.local import WorkerFailed, describe_exit, exit_code_of, report_failure, run_local
from foundry.parallel.watchdog import CollectiveError
from foundry.run_dir import ends

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _handlers_and_logging_come_back():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.long
def test_run_local_returns_the_result_of_rank_zero_without_other_output(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    answer = run_local(2, all_reduce, 10)
    assert answer == {"sum": 21, "rank": 0, "world_size": 2, "threads": str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert "OMP_NUM_THREADS" not in os.environ
    out, err = capfd.readouterr()
    assert out == "rank 0 speaks\n"
    assert err == ""


@pytest.mark.long
def test_worker_failed_names_the_rank_that_failed_first(capfd):
    with pytest.raises(WorkerFailed) as caught:
        run_local(2, fail_on_rank_one)
    assert caught.value.rank == 1
    assert str(caught.value) == "rank 1 failed: ValueError: unknown token: 99"
    assert "in fail_on_rank_one" in caught.value.trace
    assert capfd.readouterr().err == ""


def test_first_rank_that_exits_early_without_an_error_has_failed():
    with pytest.raises(WorkerFailed, match=r"^rank 0 failed: ended with exit code 0 before the end of the run$"):
        run_local(1, exit_early)


def test_failing_rank_skips_the_destructors_of_its_libraries(capfd):
    with pytest.raises(WorkerFailed, match="unknown token: 99"):
        run_local(1, fail_with_exit_handlers)
    assert capfd.readouterr() == ("", "handler of Python\n")


@pytest.mark.long
def test_failing_rank_reports_its_error_before_it_leaves_the_group():
    with pytest.raises(WorkerFailed, match=r"unknown token: 99, in a group: True"):
        run_local(2, fail_and_say_whether_the_group_is_left)


def test_run_local_raises_the_config_error_of_a_worker():
    with pytest.raises(ConfigError) as caught:
        run_local(1, configuration_mistake)
    assert str(caught.value) == "model.width: is 7 but must be even\nseed: is -1"
    assert [violation.key for violation in caught.value.violations] == ["model.width", "seed"]


@pytest.mark.long
def test_worker_failed_names_a_killed_rank():
    with pytest.raises(WorkerFailed, match=r"rank 1 failed: killed by SIGKILL: out of memory\?") as caught:
        run_local(2, die_silently)
    assert caught.value.exit_code == ExitCode.RANK_LOST


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("error", "variables", "code"),
    [
        (ConfigError(Violation("seed", "is -1")), TORCHRUN, 2),
        (Stopped(signal.SIGUSR2, 3, None, "stopped"), TORCHRUN, 140),
        (WorkerFailed(1, "killed by SIGKILL", exit_code=75), {}, 75),
        (ValueError("unknown token: 99"), TORCHRUN, 1),
        (CollectiveError("rank 0, step 3: another rank has ended"), TORCHRUN, 75),
        (CollectiveError("rank 0, step 3: another rank has ended"), SLURM, 1),  # srun reports the highest code
        (ConnectionError("Connection refused"), {}, 1),  # no other rank
    ],
)
def test_exit_code_of_an_error_tells_its_cause_from_its_consequence(monkeypatch, error, variables, code):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert exit_code_of(error) == code


def test_rank_that_lost_another_one_reports_after_the_launcher_has_seen_the_cause(monkeypatch, tmp_path):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    waits = []
    monkeypatch.setattr(local.time, "sleep", lambda seconds: waits.append((seconds, list(tmp_path.iterdir()))))
    report_failure(CollectiveError("rank 0, step 3: another rank has ended"))
    assert waits == [(3.0, [])]
    report = json.loads((tmp_path / "error.json").read_text())["message"]
    assert report["message"] == "CollectiveError: rank 0, step 3: another rank has ended"
    assert report["errorCode"] == 75
    report_failure(ValueError("unknown token: 99"))
    assert len(waits) == 1


def test_error_file_has_no_secrets_and_failing_to_write_it_hides_nothing(monkeypatch, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report_failure(ValueError("no answer from https://me:pass-word@host/x"))
    assert "pass-word" not in file.read_text()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    report_failure(ValueError("first line"))


def test_cause_of_a_lost_rank_is_the_first_failure_that_a_rank_of_the_node_has_reported(monkeypatch, tmp_path):
    def report(rank, error, seconds):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("RANK", str(8 + rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        monkeypatch.setattr(ends.time, "time", lambda: seconds)
        report_failure(error)

    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(local.time, "sleep", lambda seconds: None)
    report(0, CollectiveError("rank 8, step 3: another rank has ended"), 1.0)
    assert ends.find_cause() is None
    report(1, ValueError("unknown token: 99"), 3.5)
    report(2, ValueError("unknown token: 98"), 3.2)
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "error.json").write_text('{"message": "of another program"}')
    assert ends.find_cause() == "rank 10 failed: ValueError: unknown token: 98"
    monkeypatch.setenv("LOCAL_RANK", "0")  # not the layout of torchrun: the file is in folder 2
    assert ends.find_cause() is None


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts local_workers.py in a new process group, as a shell does, and waits for worker files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started = []

    def start_script(function, ready="*.pid", number=2):
        script = Path(__file__).with_name("local_workers.py")
        command = [sys.executable, script, function, str(tmp_path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob(ready))) < number and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(tmp_path.glob(ready))) == number
        return process

    yield start_script
    for process in started:
        process.kill()
        process.communicate()
    assert not any(Path(f"/proc/{path.stem}").exists() for path in tmp_path.glob("*.pid"))


@pytest.mark.parametrize(
    ("sent", "code"),
    [long_case(signal.SIGTERM, 143), long_case(signal.SIGHUP, 129), (signal.SIGINT, 130)],
)
def test_signal_ends_workers_without_a_checkpoint(start, sent, code):
    process = start("sleep")
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", "")


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGUSR2, 140, marks=pytest.mark.long)]
)
def test_signal_makes_workers_save_and_raises_stopped(start, tmp_path, sent, code):
    process = start("train")
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    steps = [int(path.read_text()) for path in tmp_path.glob("*.saved")]
    assert len(steps) == 2
    assert steps[0] == steps[1]
    assert out == f"stopped by {sent.name} after step {steps[0]}; the checkpoint is {tmp_path}"


@pytest.mark.long
def test_ctrl_c_to_the_process_group_counts_once(start, tmp_path):
    process = start("train")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert out.startswith("stopped by SIGINT after step ")
    assert len(list(tmp_path.glob("*.saved"))) == 2


@pytest.mark.long
def test_ctrl_c_during_worker_imports_ends_them_without_output(start, tmp_path):
    process = start("train", ready="foundry-*", number=1)
    time.sleep(1.0)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20  # killed at once, with a margin for slow machines
    assert (process.returncode, out, err) == (130, "", "")
    assert not list(tmp_path.glob("*.saved"))


def test_second_ctrl_c_kills_workers_at_once(start):
    process = start("ignore_signals")
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20  # killed at once, with a margin for slow machines
    assert (process.returncode, out, err) == (130, "", "")


def test_run_local_raises_stopped_of_a_worker(tmp_path):
    with pytest.raises(Stopped) as caught:
        run_local(1, stop_after_signal, signal.SIGUSR1, tmp_path)
    stopped = caught.value
    assert stopped.code == 138
    assert (stopped.signum, stopped.step, stopped.checkpoint, stopped.state) == (
        signal.SIGUSR1,
        7,
        tmp_path,
        "requeued",
    )


@pytest.mark.parametrize(
    "signum", some_of([signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], signal.SIGTERM)
)
def test_signal_forwarded_to_an_exiting_worker_is_harmless(signum):
    with pytest.raises(Stopped) as caught:
        run_local(1, stop_and_be_asked_again, signum)
    assert caught.value.signum is signum


def test_failed_save_after_a_signal_raises_worker_failed():
    with pytest.raises(WorkerFailed, match="rank 0 failed: OSError: no space left on device"):
        run_local(1, stop_after_signal, signal.SIGTERM, None)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "killed by SIGKILL: out of memory?"),
        (-15, "killed by SIGTERM"),
        (-40, "killed by signal 40"),  # a real-time signal
        (-127, "killed by signal 127"),  # exit code 255, as Ray reports it
        (3, "ended with exit code 3"),
    ],
)
def test_end_of_a_process_is_described_for_every_code(code, text):
    assert describe_exit(code) == text
