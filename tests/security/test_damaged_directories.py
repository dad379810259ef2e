"""`report`, `diff` and `sync` on damaged directories print an error line or a row, without a traceback or a hang."""

import json
import os
import shutil
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.examples import examples

from foundry.commands import sync
from foundry.commands.diff import DiffOptions, print_differences
from foundry.commands.report import ReportOptions, print_report
from foundry.core.errors import ConfigError
from foundry.launch.slurm import unwatched as slurm_unwatched
from foundry.run_dir.status import write_status
from foundry.sweeps.reading import Which
from foundry.sweeps.report import report, watch
from foundry.tracking.mlflow.destination import Destination
from foundry.tracking.mlflow.queue import write_pending

ESCAPE = "\x1b]0;owned\x07\x1b[2J\r\x08\x9b31m"

numbers = st.one_of(
    st.integers(),
    st.just(10**400),
    st.just(-(10**4000)),
    st.floats(),
    st.sampled_from([2**63, -(2**63), 1e308, -1.0, 0]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.just(ESCAPE)),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=5,
)
KEYS = {
    "sweep.json": ("command", "created", "launcher", "metric", "direction", "jobs"),
    "0/status.json": ("state", "reason", "step", "config_hash", "started", "updated", "version"),
    "0/result.json": ("val_loss", "best", "step", "pruned", "loss"),
    "0/plan.json": ("total_steps",),
    "0/slurm.json": ("job_id", "error_output", "cluster"),
    "0/metrics.jsonl": ("step", "val_loss", "loss", ESCAPE),
    "0/mlflow.json": ("uri", "experiment_name", "run_name", "run_id", "key", "started_ms"),
    "0/mlflow_pending.jsonl": ("op", "values", "file", "to", "time_ms", "step", "status", "text"),
    "0/mlflow_parent.json": ("sweep", "job", "swept"),
    "0/config.yaml": ("hparams", "model", ESCAPE),
    "0/.hydra/overrides.yaml": (),
    "0/foundry.log": (),
    "0/.lock": (),
    "mlflow.json": ("uri",),
}


def damages(name):
    """Return a strategy for the damage of one file: (file name, damage: a kind, bytes or changed values)."""
    changed = st.tuples(st.sampled_from(KEYS[name] or ("x",)), values)
    job_entries = st.tuples(
        st.just("jobs"),
        st.lists(
            st.one_of(
                values,
                st.fixed_dictionaries(
                    {
                        "index": st.one_of(numbers, values),
                        "dir": st.sampled_from(["0", "..", "/etc", "x\0", "", "nowhere", ESCAPE]),
                        "overrides": st.one_of(values, st.lists(st.just(ESCAPE), max_size=2)),
                    }
                ),
            ),
            max_size=3,
        ),
    )
    return st.tuples(
        st.just(name),
        st.one_of(
            st.sampled_from(
                ["missing", "empty", "torn", "zeros", "pipe", "folder", "link", "loop", "device", "a terabyte"]
            ),
            st.binary(max_size=20),
            changed,
            job_entries if name == "sweep.json" else changed,
        ),
    )


def whole(folder):
    """Write the directory of a sweep with two jobs and with records that MLflow has not received."""
    for job, state in (("0", "failed"), ("1", "finished")):
        run_dir = folder / job
        (run_dir / ".hydra").mkdir(parents=True)
        write_status(run_dir, state=state, reason="x", started="2026-01-01T00:00:00+00:00")
        (run_dir / "result.json").write_text('{"val_loss": 1.5, "best": {"val_loss": 1.0, "step": 1}}')
        (run_dir / "config.yaml").write_text(f'{{"hparams": {{"lr": {job}}}}}')
        (run_dir / "plan.json").write_text('{"total_steps": 5}')
        (run_dir / "slurm.json").write_text('{"job_id": "1", "error_output": "x", "cluster": "none"}')
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "val_loss": 1.5}\n{"step": 1, "loss": 2}\n')
        (run_dir / ".hydra" / "overrides.yaml").write_text(f"- hparams.lr={job}\n")
        (run_dir / "foundry.log").write_text("last\n")
        (run_dir / ".lock").write_text("another-machine")
        Destination.of(run_dir, uri="http://127.0.0.1:9", experiment_name="x", run_name="y").save(run_dir)
        write_pending(run_dir / "mlflow_pending.jsonl", [{"op": "start"}])
        (run_dir / "mlflow_parent.json").write_text('{"sweep": "..", "job": 0, "swept": {}}')
    jobs = [{"index": i, "dir": str(i), "overrides": [f"hparams.lr={i}"]} for i in range(2)]
    facts = {"command": ["-m"], "created": "x", "launcher": "local", "metric": "val_loss", "direction": "minimize"}
    (folder / "sweep.json").write_text(json.dumps(facts | {"jobs": jobs}))
    (folder / "mlflow.json").write_text("{}")


def damage(folder, name, how):
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    match how:
        case "missing":
            pass
        case "empty":
            path.touch()
        case "torn":
            path.write_bytes(content[: len(content) // 2])
        case "zeros":
            path.write_bytes(bytes(len(content)))
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/etc/passwd")
        case "loop":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "a terabyte":
            with path.open("wb") as file:
                file.truncate(2**40)
        case bytes():
            path.write_bytes(how)
        case (key, value) if name.endswith((".json", ".jsonl", "config.yaml")):
            first, _, rest = content.decode().partition("\n" if name.endswith("l") else "\0")
            path.write_text(json.dumps(json.loads(first) | {key: value}) + ("\n" + rest if name.endswith("l") else ""))
        case (_, value):
            path.write_text(str(value), errors="replace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch, folder):
    monkeypatch.setattr(slurm_unwatched, "cluster_name", lambda: "another")
    monkeypatch.setattr(sync, "send_file", lambda store, pending: 1)
    monkeypatch.setattr(sync, "_check_artifacts", lambda store, destination: None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("COLUMNS", "200")


def shown(call, capsys):
    """Return the output and exit code of a command; fail if it takes more than 120 seconds."""
    begin = time.monotonic()
    try:
        code = call()
    except ConfigError as error:
        print(error)  # noqa: T201 # as `enter` does
        code = 2
    except SystemExit as ended:
        code = ended.code
    assert time.monotonic() - begin < 120, "waits for somebody"
    message = "".join(capsys.readouterr())
    assert message
    assert "Traceback" not in message
    assert not set(message) & set("\x1b\x07\x08\x9b\r\0")
    return message, code


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(250), deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(sorted(KEYS)).flatmap(damages), min_size=1, max_size=3, unique_by=lambda item: item[0]))
def test_commands_report_any_damage_without_a_traceback(folder, damaged):
    import contextlib
    import io

    sweep_dir = folder / "sweep"
    shutil.rmtree(sweep_dir, ignore_errors=True)
    whole(sweep_dir)
    for name, how in damaged:
        damage(sweep_dir, name, how)

    class Both:
        def readouterr(self):
            return out.getvalue(), err.getvalue()

    for call in (
        lambda: report(sweep_dir, Console(), picture=False),
        lambda: print_report(ReportOptions(dir=str(sweep_dir), picture=False, which=Which.best)).exit_code,
        lambda: report(sweep_dir / "0", Console(), picture=False),
        lambda: print_differences(DiffOptions(run=str(sweep_dir / "0"), against=str(sweep_dir / "1"))).exit_code,
        lambda: sync.run([f"dir={sweep_dir / '0'}"]),
    ):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            _, code = shown(call, Both())
        assert code in (0, 1, 2, 3)


def test_report_shows_a_damaged_job_in_its_row_beside_intact_jobs(tmp_path, capsys):
    whole(tmp_path / "sweep")
    damage(tmp_path / "sweep", "0/status.json", "empty")
    message, code = shown(lambda: report(tmp_path / "sweep", Console(width=300), picture=False), capsys)
    assert code == 3
    assert "status.json is empty or not JSON" in message
    assert "1 finished, 1 unknown" in message


@pytest.mark.parametrize("dir", ["nowhere", "file", "sweep/0/foundry.log", "sweep/empty", "x\0y"])
def test_report_and_sync_reject_paths_that_are_no_run_directory(dir, tmp_path, capsys):
    whole(tmp_path / "sweep")
    (tmp_path / "file").touch()
    (tmp_path / "sweep" / "empty").mkdir()
    for call in (
        lambda: print_report(ReportOptions(dir=str(tmp_path / dir))),
        lambda: sync.run([f"dir={tmp_path / dir}"]),
    ):
        _, code = shown(call, capsys)
        assert code == 2 or "0 records sent" in _


@pytest.mark.parametrize("is_terminal", [True, False])
def test_report_strips_escape_sequences_from_run_files(is_terminal, tmp_path, capsys):
    sweep_dir = tmp_path / "sweep"
    whole(sweep_dir)
    facts = json.loads((sweep_dir / "sweep.json").read_text())
    job = f"{ESCAPE}job"
    (sweep_dir / "0").rename(sweep_dir / job)
    facts["jobs"][0] |= {"dir": job, "overrides": [f"a{ESCAPE}=b{ESCAPE}"]}
    facts |= {"metric": f"val{ESCAPE}_loss", "command": [f"--config-dir={ESCAPE}"], "launcher": ESCAPE}
    (sweep_dir / "sweep.json").write_text(json.dumps(facts))
    (sweep_dir / job / "status.json").write_text(json.dumps({"state": "failed", "reason": f"boom {ESCAPE}"}))
    (sweep_dir / "1" / "result.json").write_text(json.dumps({"val_loss": 1, "pruned": f"why {ESCAPE}"}))
    (sweep_dir / "1" / ".hydra" / "overrides.yaml").write_text(json.dumps([f"x={ESCAPE}"]))
    console = Console(width=200, color_system=None, force_terminal=is_terminal)
    report(sweep_dir, console, picture=False)
    watch(sweep_dir, Console(width=200, color_system=None), which=Which.last, seconds=1)
    message = capsys.readouterr().out
    assert "boom" in message
    for text in ("owned", "\x07", "\x08", "\x9b", "\x1b]0"):
        assert text not in message, "link targets of rich are OSC 8"
