"""Special files under the names of run files: foundry does not write through them or block on them."""

import logging
import os
import signal
from contextlib import contextmanager

import pytest
from rich.console import Console

from foundry.config.composition.job_overrides import recorded_overrides
from foundry.core.events import PlannedUpdate, RunEnded, RunStarted, StepLogged
from foundry.generation.text_samples import TextSamples
from foundry.launch.slurm.end import ErrorOutput, Submission
from foundry.launch.slurm.open_submission import OpenSubmission
from foundry.launch.snapshot import FOLDER, snapshot
from foundry.planning.report import write_csv
from foundry.run_dir.files import UnsafeFileError
from foundry.run_dir.lock import is_held, lock
from foundry.run_dir.log import RunLog
from foundry.run_dir.status import read_status, write_status
from foundry.run_dir.strict_json import DamagedFileError
from foundry.run_dir.trial import TrialLink
from foundry.sweeps.report import report
from foundry.tracking.metrics_file import MetricsFile, read_metrics
from foundry.tracking.mlflow.destination import Destination
from foundry.tracking.mlflow.parent_link import ParentLink
from foundry.tracking.mlflow.queue import read_pending, write_pending
from foundry.tracking.plot_style import blank, save_figure
from foundry.tracking.plots import Plots
from foundry.tracking.status_file import StatusFile

PRECIOUS = "precious"
KINDS = ("link", "dangling", "pipe", "folder", "device")


@contextmanager
def seconds(limit=5):
    """Fail if the body blocks for longer than `limit` seconds."""

    def give_up(signum, frame):
        raise TimeoutError(f"waits for more than {limit} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def complaint(call, *kinds):
    """Return the message of an exception of these types, or "" if none is raised."""
    try:
        call()
    except kinds as error:
        return str(error)
    return ""


def put(kind, path, tmp_path):
    """Create a special file at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "link":
            path.symlink_to(tmp_path / "target")
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")


@pytest.fixture
def target(tmp_path):
    (tmp_path / "target").write_text(PRECIOUS)
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    assert (tmp_path / "target").read_text() == PRECIOUS
    assert not (tmp_path / "nowhere").exists()


def started(run_dir):
    return RunStarted(run_dir=run_dir, config={}, config_hash="c0ffee", plan={}, updates=[], phases=(), step=0)


def logged(step):
    numbers = dict.fromkeys(
        ("epoch", "loss", "lr", "weight_decay", "grad_norm", "samples_per_second", "step_seconds"), 0.5
    )
    return StepLogged(
        step=step,
        samples=step,
        tokens=None,
        global_batch_size=1,
        tokens_per_second=None,
        tflops=None,
        mfu=None,
        peak_memory_bytes=None,
        metrics={},
        **numbers,
    )


def follow(observer, run_dir):
    observer.on_start(started(run_dir))
    observer.on_step(logged(1))
    observer.on_end(RunEnded(state="finished", reason="", result={"step": 1}))


def figure():
    return blank((1, 1), bottom=0.1, top=0.9)


UPDATE = PlannedUpdate(step=1, samples=1, global_batch_size=1, lr=0.1, weight_decay=0.1)
OPEN_SUBMISSION = OpenSubmission(
    script="/x.sh", folder="/%j", cluster="y", run_dirs=("/0",), stderr_to_stdout=False, last_seen=0.0
)
WRITERS = {
    "metrics.jsonl": lambda run_dir: follow(MetricsFile(run_dir=run_dir), run_dir),
    "status.json": lambda run_dir: write_status(run_dir, state="failed"),
    "result.json": lambda run_dir: follow(StatusFile(run_dir=run_dir), run_dir),
    "foundry.log": lambda run_dir: RunLog(run_dir / "foundry.log").emit(logging.makeLogRecord({"msg": "x"})),
    "plots/samples.txt": lambda run_dir: TextSamples(("a b",)).save(run_dir / "plots" / "samples"),
    "plots/loss.png": lambda run_dir: follow(Plots(run_dir=run_dir), run_dir),
    "report.png": lambda run_dir: save_figure(figure(), run_dir / "report.png"),
    ".report.png.partial": lambda run_dir: save_figure(figure(), run_dir / "report.png"),
    "schedule.csv": lambda run_dir: write_csv([UPDATE], run_dir),
    "mlflow_pending.jsonl": lambda run_dir: write_pending(run_dir / "mlflow_pending.jsonl", [{"op": "start"}]),
    "mlflow.json": lambda run_dir: Destination.of(run_dir, uri="x", experiment_name="y", run_name="z").save(run_dir),
    "mlflow_parent.json": lambda run_dir: ParentLink.write(run_dir, run_dir.parent, 1, ["a=b"]),
    "slurm.json": lambda run_dir: Submission(job_id="1", error_output="x", cluster="y").save(run_dir),
    "slurm_submission.json": lambda run_dir: OPEN_SUBMISSION.save(run_dir),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
def test_writers_do_not_write_through_special_files(name, kind, target, tmp_path):
    put(kind, target / name, tmp_path)
    with seconds(20):
        message = complaint(lambda: WRITERS[name](target), UnsafeFileError)
    assert not message or name.rpartition("/")[2] in message


@pytest.mark.parametrize("name", ["plots", ".hydra", ".failures"])
def test_plots_are_not_written_into_a_linked_folder(name, target, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (target / name).symlink_to(tmp_path / "elsewhere")
    follow(Plots(run_dir=target), target)
    assert not list((tmp_path / "elsewhere").iterdir())


def journal(run_dir):
    return TrialLink.load(run_dir)


READERS = {
    "status.json": read_status,
    "metrics.jsonl": read_metrics,
    "trial.json": journal,
    "slurm.json": Submission.load,
    "slurm_submission.json": OpenSubmission.load,
    "mlflow.json": Destination.load,
    "mlflow_parent.json": ParentLink.load,
    "mlflow_pending.jsonl": lambda run_dir: list(read_pending(run_dir / "mlflow_pending.jsonl")),
    ".hydra/overrides.yaml": recorded_overrides,
    ".lock": is_held,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_readers_do_not_block_on_special_files(name, kind, target, tmp_path):
    put(kind, target / name, tmp_path)
    with seconds():
        message = complaint(lambda: READERS[name](target), UnsafeFileError, DamagedFileError)
    assert not message or name in message


BROKEN = {
    "empty": b"",
    "zeros": bytes(4096),
    "torn": b'{"state": "runn',
    "binary": bytes(range(128, 256)),
    "list": b"[1, 2]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "wrong types": b'{"state": 5, "job_id": [], "uri": {}, "sweep": 1, "job": "x", "swept": 1, "journal": null}',
    "nothing in it": b"{}",
    "huge number": b'{"state": "running", "step": 1' + b"0" * 5000 + b"}",
    "a terabyte": None,
}


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("name", [name for name in READERS if name != ".lock"])
def test_readers_of_damaged_files_raise_short_errors(name, content, target):
    path = target / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(2**40) if BROKEN[content] is None else file.write(BROKEN[content])
    with seconds():
        message = complaint(lambda: READERS[name](target), OSError, ValueError)
    assert not message or (name in message and len(message) < 500)


@pytest.mark.parametrize("content", BROKEN)
def test_damaged_status_file_warns_once_and_is_rewritten(content, target, caplog):
    with (target / "status.json").open("wb") as file:
        file.truncate(2**40) if BROKEN[content] is None else file.write(BROKEN[content])
    assert read_status(target) == {}
    assert read_status(target) == {}
    assert len(caplog.records) == 1
    assert "status.json" in caplog.text
    write_status(target, state="queued")
    assert read_status(target)["state"] == "queued"


@pytest.mark.parametrize("kind", KINDS)
def test_lock_rejects_special_files(kind, target, tmp_path):
    from contextlib import ExitStack

    put(kind, target / ".lock", tmp_path)
    with seconds(), ExitStack() as held, pytest.raises(UnsafeFileError, match="lock"):
        lock(target, held)
    assert is_held(target) is None


def test_run_log_warns_about_a_pipe_as_log_file(target, tmp_path, capfd, caplog):
    put("pipe", target / "foundry.log", tmp_path)
    with seconds():
        RunLog(target / "foundry.log").emit(logging.makeLogRecord({"msg": "message"}))
    assert "foundry.log is a named pipe" in caplog.text


def test_linked_metrics_file_warns_and_the_run_continues(target, tmp_path, caplog):
    put("link", target / "metrics.jsonl", tmp_path)
    follow(MetricsFile(run_dir=target), target)
    assert "metrics.jsonl is a symbolic link" in caplog.text


def test_resume_drops_invalid_lines_from_the_metrics_file(target):
    path = target / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bytes(64) + b'\nnot json\n[1]\n{"loss": 1}\n{"step": "x"}\n{"step": 9}\n{"ste')
    follow(MetricsFile(run_dir=target), target)
    assert [record["step"] for record in read_metrics(target)] == [0, 1]


def test_job_error_output_is_read_from_regular_files_only(target, tmp_path):
    for kind in KINDS:
        place = tmp_path / f"output-{kind}"
        put(kind, place, tmp_path)
        Submission(job_id="7", error_output=str(place), cluster="c").save(target)
        with seconds():
            assert ErrorOutput(target).first_end() is None


def test_code_snapshot_rejects_linked_folders(target, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (FOLDER, f".{FOLDER}.partial"):
        (target / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UnsafeFileError, match="symbolic link"):
            snapshot(target)
        (target / name).unlink()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_unwritable_report_files_give_a_one_line_error(target, tmp_path, capsys):
    job = target / "0"
    job.mkdir()
    write_status(job, state="failed", reason="boom")
    (target / "report.csv").mkdir()
    put("link", target / "report.json", tmp_path)
    assert report(target, Console(width=300)) == 1
    assert "report.csv is a folder" in capsys.readouterr().out
