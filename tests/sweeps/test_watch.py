import io
import json
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from support.sweep_dirs import SweepDir, hold_lock

from foundry.sweeps import report as module
from foundry.sweeps.reading import Which
from foundry.sweeps.report import report, watch


@pytest.fixture
def sweep_dir(tmp_path, events):
    return SweepDir(tmp_path / "sweep", type(events))


@pytest.fixture
def meanwhile(monkeypatch):
    """A function that schedules one callback for each poll after the first."""

    def schedule(*happenings):
        left = list(happenings)
        monkeypatch.setattr(module.time, "sleep", lambda _: left.pop(0)())
        return left

    return schedule


def becomes(run_dir, state, **changes):
    path = run_dir / "status.json"

    def happen():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"state": state, **changes}))

    return happen


def interrupt():
    raise KeyboardInterrupt


def test_watch_prints_one_line_per_state_change(sweep_dir, meanwhile):
    sweep_dir.job("hparams.lr=1", losses=(3.0, 1.5))
    second = sweep_dir.job("hparams.lr=2", state="stopped", losses=(2.0,))
    becomes(second, "requeued")()
    left = meanwhile(lambda: None, becomes(second, "queued"), becomes(second, "failed", reason="ValueError: no"))
    console = Console(file=io.StringIO())
    assert watch(sweep_dir.folder, console, which=Which.last, seconds=2.0)
    assert left == []
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in console.file.getvalue().splitlines()]
    assert lines == [
        "job 0 finished, lr=1, step 200, val_loss 1.5000",
        "job 1 requeued, lr=2, step 200, val_loss 2.0000",
        "job 1 queued, lr=2, step 200, val_loss 2.0000",
        "job 1 failed, lr=2, step 200, val_loss 2.0000, ValueError: no",
    ]


def test_watch_in_a_terminal_updates_the_table_until_the_sweep_ends(sweep_dir, meanwhile):
    run_dir = sweep_dir.job("hparams.lr=1", state="stopped")
    becomes(run_dir, "queued")()
    left = meanwhile(becomes(run_dir, "requeued"), becomes(run_dir, "finished"))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert watch(sweep_dir.folder, console, which=Which.last, seconds=2.0)
    assert left == []
    message = console.file.getvalue()
    assert message.index("queued") < message.index("requeued") < message.index("1 finished")


def test_watch_does_not_wait_for_a_sweep_without_a_process(sweep_dir):
    sweep_dir.job("hparams.lr=1")
    sweep_dir.job("hparams.lr=2", state="queued")
    with hold_lock(sweep_dir.folder):
        pass
    command = [sys.executable, "-m", "foundry.report", f"dir={sweep_dir.folder}", "watch=true", "picture=false"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (process.returncode, process.stderr) == (3, "")
    assert "job 0 finished" in process.stdout.splitlines()[0]
    assert "the sweep is not running; the same command resumes it" in process.stdout
    assert json.loads((sweep_dir.folder / "report.json").read_text())["is_going"] is False


def test_watch_returns_false_after_an_interrupt(sweep_dir, meanwhile):
    sweep_dir.job("hparams.lr=1", state="queued")
    meanwhile(interrupt)
    assert not watch(sweep_dir.folder, Console(file=io.StringIO()), which=Which.last, seconds=2.0)


def test_ctrl_c_in_watch_prints_the_state_so_far(sweep_dir):
    with hold_lock(sweep_dir.job("hparams.lr=1", state="running", losses=(1.5,), step=80)):
        command = [sys.executable, "-m", "foundry.report", f"dir={sweep_dir.folder}", "watch=true", "seconds=60"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            assert "job 0 running" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (3, "")
    assert "running" in stdout
    assert "best so far: job 0, val_loss 1.5000" in stdout


def test_report_writes_its_files_and_names_them(sweep_dir):
    sweep_dir.job("hparams.lr=1")
    console = Console(file=io.StringIO())
    assert report(sweep_dir.folder, console) == 0
    assert console.file.getvalue().endswith(f"in {sweep_dir.folder}: report.csv, report.json, report.png\n")
    files = [sweep_dir.folder / name for name in ("report.csv", "report.json", "report.png")]
    assert all(file.stat().st_size > 50 for file in files)


def test_report_is_shown_if_its_files_cannot_be_written(sweep_dir):
    sweep_dir.job("hparams.lr=1")
    (sweep_dir.folder / "report.csv").mkdir()
    console = Console(file=io.StringIO())
    assert report(sweep_dir.folder, console) == 0
    assert "1 job: 1 finished" in console.file.getvalue()
    assert "no files written: " in console.file.getvalue()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "dir: has no value; give it as dir=..."),
        (["dir=nowhere"], "dir: is nowhere, which is not a folder; give the directory of a sweep"),
        (["dir=.", "wich=best"], "wich: is not an option; did you mean which?"),
        (["dir=.", "which=first"], "which: "),
        (["dir=.", "seconds=0"], "seconds: is 0 but must be above 0"),
    ],
)
def test_report_command_refuses_wrong_options(tmp_path, overrides, message):
    command = [sys.executable, "-m", "foundry.report", *overrides]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(message)
    assert len(process.stderr.splitlines()) == 1
