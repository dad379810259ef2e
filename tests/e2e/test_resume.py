"""Starting a run again: finished runs, changed settings and data, other checkpoints, corruption, kills and signals."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support.examples import some_of
from support.in_process import Commands
from support.outcome import losses, outcome, status
from support.small_text import RUN, SMALL, write_text

from foundry.checkpoint.folder import problems
from foundry.run_dir.checkpoints import find, list_checkpoints

STEPS = 40
LLAMA = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LLAMA += ("rms_norm_eps", "tie_word_embeddings")
MAX, LONG = f"hparams.max_steps={STEPS}", "hparams.max_steps=200"
CORRUPTIONS = {
    "truncated shard": ("shard-00000.safetensors", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "missing rank file": ("rank-00000.json", lambda path: path.unlink()),
    "flipped byte": ("shard-00000.safetensors", lambda path: flip(path)),
    "half manifest": ("manifest.json", lambda path: os.truncate(path, path.stat().st_size // 2)),
}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache, text):
    """The directory of an uninterrupted run with all its checkpoints; read-only."""
    run_command = Commands(tmp_path_factory.mktemp("finished"), cache)
    run_command(*RUN, *SMALL, text, MAX, "hydra.run.dir=run")
    return run_command.cwd / "run"


@pytest.fixture
def go(run_command, text):
    """A function that runs foundry with `hydra.run.dir=run` and more overrides."""
    return lambda *overrides, code=0: run_command(*RUN, *SMALL, text, "hydra.run.dir=run", *overrides, code=code)


@pytest.fixture
def run_dir(shell, finished):
    """A copy of the finished run."""
    return shutil.copytree(finished, shell.cwd / "run", symlinks=True)


@pytest.fixture
def broken_off(run_dir):
    """A copy of the run in its state after a kill between its last two checkpoints."""
    shutil.rmtree(list_checkpoints(run_dir)[0])
    (run_dir / "result.json").unlink()
    (run_dir / "status.json").write_text(json.dumps({**status(run_dir), "state": "running"}))
    return run_dir


def kill(process, number):
    os.kill(process.pid, number)


def kill_all(process, number):
    """Send a signal to a process and all its descendants, as a scheduler does."""
    pids = [process.pid]
    for pid in pids:
        pids += [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_repeated_command_reports_that_the_run_is_finished(run_dir, go, finished):
    stderr = go(MAX)[1]
    assert "holds a finished run; choose another hydra.run.dir to train again" in stderr
    assert outcome(run_dir) == outcome(finished)


@pytest.mark.parametrize("kept", ["checkpoints", "config.yaml"])
def test_finished_run_refuses_other_settings(run_dir, go, kept):
    if kept == "config.yaml":
        shutil.rmtree(run_dir / "checkpoints")
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*.json*"))
    stderr = go(MAX, "hparams.lr=2e-3", "evaluation.max_samples=4", "tracking.log_every_n_steps=3", code=2)[1]
    assert [line.partition(":")[0] for line in stderr.splitlines()] == ["hparams.lr", "evaluation.max_samples"]
    assert "is 0.002 but run holds a finished run with 0.004; change it back, or choose another" in stderr.replace(
        str(run_dir), "run"
    )
    assert "holds a finished run; choose another" in go(MAX, "tracking.log_every_n_steps=3")[1]
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*.json*")) == before


def test_damaged_result_of_a_finished_run_is_written_again(run_dir, go, finished):
    (run_dir / "result.json").write_text("{")
    go(MAX)
    assert outcome(run_dir) == outcome(finished)


def test_larger_max_steps_continues_under_the_same_schedule_horizon(run_dir, go):
    stdout, _ = go("hparams.max_steps=45", f"scheduler.horizon='{STEPS}'")
    assert f"after step {STEPS}" in stdout
    assert "step 41/45" in stdout
    assert "step 40/45" not in stdout
    assert list(losses(run_dir)) == list(range(1, 46))
    assert status(run_dir)["state"] == "finished"


@pytest.mark.long
def test_larger_max_steps_stretches_the_schedule_only_on_request(run_dir, go):
    stderr = go("hparams.max_steps=45", code=2)[1]
    (line,) = [line for line in stderr.splitlines() if line.startswith("scheduler.horizon")]
    assert f"{45 * 4}" in line
    assert f"{40 * 4}" in line
    assert status(run_dir)["state"] == "finished"
    go("hparams.max_steps=45", "checkpoint.scheduler_on_resume=config")
    go("hparams.max_steps=50", "checkpoint.scheduler_on_resume=checkpoint")
    assert list(losses(run_dir)) == list(range(1, 51))
    rates = [json.loads(line).get("lr") for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [rate for rate in rates if rate is not None][-5:] == [0.0] * 5


def test_resume_refuses_changed_settings_with_one_line_each(broken_off, go):
    before = outcome(broken_off)
    stdout, stderr = go(MAX, "hparams.seed=7", "model.hidden_size=32", code=2)
    assert stdout == ""
    assert [line.partition(":")[0] for line in stderr.splitlines()] == ["hparams.seed", "model.hidden_size"]
    assert "is 7 but the checkpoint was trained with 42" in stderr
    warning, line = go(MAX, "hparams.lr=0.5", code=2)[1].splitlines()
    assert "hparams.lr=0.5 is 125 times the default of hparams=llm, 0.004" in warning
    assert line.startswith("scheduler.max_lr: ")
    assert outcome(broken_off) == before
    assert status(broken_off)["state"] == "running"
    stderr = go(MAX, "hparams.seed=7", "checkpoint.on_changed_config=warn")[1]
    assert stderr.count("resumed with another hparams.seed: 42 -> 7") == 1
    assert list(losses(broken_off)) == list(range(1, STEPS + 1))


@pytest.mark.long
def test_resume_refuses_a_checkpoint_that_does_not_fit_the_model(run_dir, go):
    overrides = [
        "hparams.max_steps=45",
        "checkpoint.on_changed_config=warn",
        "checkpoint.scheduler_on_resume=checkpoint",
    ]
    wrong = {
        "model.hidden_size=32": "with shape (300, 16), this run with (300, 32)",
        "hparams.ema_decay=0.9": "lacks ema.",
    }
    for word, message in wrong.items():
        stderr = go(*overrides, word, code=2)[1]
        (line,) = [line for line in stderr.splitlines() if line.startswith("checkpoint.resume")]
        assert message in line
        assert "Traceback" not in stderr
    assert status(run_dir)["state"] == "finished"


@pytest.mark.long
def test_resume_accepts_other_tracking_checkpoint_and_microbatch_settings(broken_off, go, finished):
    overrides = ["tracking.log_every_n_steps=3", "checkpoint.interval=7", "checkpoint.asynchronous=false"]
    go(MAX, *overrides, "hparams.per_gpu_batch_size=4", "data.num_workers=1", "hparams.grad_checkpointing=true")
    ours, theirs = outcome(broken_off), outcome(finished)
    assert ours["result"]["samples"] == theirs["result"]["samples"]
    assert ours["result"]["loss"] == pytest.approx(theirs["result"]["loss"], rel=1e-5)


@pytest.mark.long
def test_resume_accepts_the_same_data_at_another_path(broken_off, shell, text, finished):
    """The file name changes too, which would change the sample order of a fresh run."""
    elsewhere = shell.cwd / "elsewhere" / "renamed.txt"
    elsewhere.parent.mkdir()
    shutil.copy(text.partition("=")[2], elsewhere)
    moved = [*RUN, *SMALL, MAX, "hydra.run.dir=run", f"data.path={elsewhere}"]
    shell.run(*moved)
    assert outcome(broken_off) == outcome(finished)
    assert "holds a finished run" in shell.run(*moved)[1]
    elsewhere.write_text(elsewhere.read_text().replace("7", "8", 1))
    assert shell.run(*moved, code=0)[1].count("finished run") == 1, "equal settings were not recognized"
    stderr = shell.run(*moved[:-1], f"data.path={elsewhere.rename(elsewhere.with_name('third.txt'))}", code=2)[1]
    assert stderr.startswith("data.path: is ")


OTHER_DATA = {
    "changed": lambda content: content.replace("1 times 1 is 1", "1 times 1 is 2"),
    "one more line": lambda content: content + "\nmore",
    "other order": lambda content: "\n".join(reversed(content.split("\n"))),
}


@pytest.mark.parametrize(
    "kind", ["changed", *(pytest.param(kind, marks=pytest.mark.long) for kind in list(OTHER_DATA)[1:])]
)
def test_resume_refuses_other_data_unless_changed_config_only_warns(broken_off, shell, text, kind):
    path = shell.cwd / "text.txt"
    path.write_text(OTHER_DATA[kind](Path(text.partition("=")[2]).read_text()))
    before = losses(broken_off)
    overrides = [*RUN, *SMALL, MAX, f"data.path={path}"]
    for place in (["hydra.run.dir=run"], ["hydra.run.dir=other", f"checkpoint.resume={broken_off}"]):
        stdout, stderr = shell.run(*overrides, *place, code=2)
        assert stdout == ""
        (line,) = stderr.splitlines()
        assert line.startswith("data.path: differs from the data that the checkpoint was trained on (content ")
        assert "checkpoint.on_changed_config=warn" in line
    assert losses(broken_off) == before
    assert not (shell.cwd / "other").exists()
    stderr = shell.run(*overrides, "hydra.run.dir=run", "checkpoint.on_changed_config=warn")[1]
    assert "resumed although data.path: differs from the data" in stderr
    assert list(losses(broken_off)) == list(range(1, STEPS + 1))


@pytest.mark.long
def test_resume_refuses_another_tokenizer_but_accepts_a_copy(broken_off, shell, text, finished):
    tokenizer = json.loads((finished / "tokenizer.json").read_text())
    same, other = shell.cwd / "same.json", shell.cwd / "other.json"
    same.write_text(json.dumps(tokenizer))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    last = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    del tokenizer["model"]["vocab"][last]
    other.write_text(json.dumps(tokenizer))
    overrides = [*RUN, *SMALL, text, MAX, "hydra.run.dir=run"]
    (line,) = [
        line for line in shell.run(*overrides, f"data.tokenizer={other}", code=2)[1].splitlines() if "tokenizer" in line
    ]
    assert line.startswith("data.tokenizer: differs from the data that the checkpoint was trained on (tokenizer ")
    shell.run(*overrides, f"data.tokenizer={same}")
    assert outcome(broken_off) == outcome(finished)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        [],
        pytest.param(
            ["distributed=fsdp", "distributed.nproc_per_node=2"], marks=[pytest.mark.distributed, pytest.mark.long]
        ),
    ],
)
def test_optimizer_with_nested_state_resumes_bit_for_bit(shell, text, layout):
    overrides = [*RUN, *SMALL, text, "hparams.max_steps=30", "optimizer=sgd", *layout]
    overrides += ["optimizer._target_=support.nested_optimizer.build_nested", "checkpoint.interval=10"]
    shell.run(*overrides, "hydra.run.dir=whole")
    shell.run(*overrides, "hydra.run.dir=run")
    newest, before = list_checkpoints(shell.cwd / "run")[:2]
    shutil.rmtree(newest)
    (shell.cwd / "run" / "result.json").unlink()
    (shell.cwd / "run" / "status.json").write_text(json.dumps({**status(shell.cwd / "run"), "state": "running"}))
    assert f"after step {before.name[-2:]}" in shell.run(*overrides, "hydra.run.dir=run")[0]
    assert outcome(shell.cwd / "run") == outcome(shell.cwd / "whole")


@pytest.mark.long
def test_unsavable_optimizer_state_is_refused_before_the_first_checkpoint(shell, text):
    overrides = [*RUN, *SMALL, text, MAX, "optimizer=sgd", "optimizer._target_=support.nested_optimizer.build_unsaved"]
    stderr = shell.run(*overrides, "hydra.run.dir=run", code=2)[1]
    (line,) = stderr.splitlines()
    assert line.startswith("optimizer: Unsaved keeps optimizer.")
    assert "history/0 as a value of type object, which a checkpoint cannot store" in line
    assert not (shell.cwd / "run" / "checkpoints").exists()
    assert status(shell.cwd / "run")["state"] == "failed"
    assert "Unsaved" in status(shell.cwd / "run")["reason"]
    shell.run(*overrides, "checkpoint=none", "checkpoint.interval=null", "hydra.run.dir=other")


@pytest.mark.distributed
def test_resume_accepts_another_number_of_processes(broken_off, shell, text, finished):
    two = ["distributed=fsdp", "distributed.nproc_per_node=2", "hydra.run.dir=run"]
    shell.run(*RUN, *SMALL, text, MAX, *two)
    assert outcome(broken_off)["result"]["loss"] == pytest.approx(outcome(finished)["result"]["loss"], rel=1e-5)
    assert list(losses(broken_off)) == list(range(1, STEPS + 1))


@pytest.mark.long
def test_checkpoint_resume_continues_from_a_checkpoint_of_another_run(shell, go, finished):
    before = sorted(path.name for path in finished.rglob("*"))
    go(MAX, f"checkpoint.resume={finished}/checkpoints/step_00000020")
    assert outcome(shell.cwd / "run")["files"] == outcome(finished)["files"]
    assert list(losses(shell.cwd / "run")) == list(range(21, STEPS + 1))
    shutil.rmtree(shell.cwd / "run")
    go("hparams.max_steps=42", "checkpoint.scheduler_on_resume=checkpoint", f"checkpoint.resume={finished}")
    assert list(losses(shell.cwd / "run")) == [41, 42]
    # At a learning rate of 0 no evaluation beats the other run's best, whose checkpoint is not in this directory.
    assert outcome(shell.cwd / "run")["result"]["best"]["step"] == 42
    assert find(shell.cwd / "run", "best").name == "step_00000042"
    stderr = go("hparams.max_steps=43", "checkpoint.resume=never", code=2)[1]
    assert stderr.startswith("checkpoint.resume: is never but")
    assert sorted(path.name for path in finished.rglob("*")) == before


@pytest.mark.parametrize(
    "overrides", [["checkpoint.resume=nowhere"], ["model.init_from=nowhere"]], ids=["resume", "init"]
)
def test_path_without_a_checkpoint_is_refused_and_writes_no_files(shell, go, overrides):
    stdout, stderr = go(MAX, *overrides, code=2)
    assert stdout == ""
    assert stderr.count("\n") == 1
    assert stderr.startswith(f"{overrides[0].partition('=')[0]}: is nowhere")
    assert not (shell.cwd / "run").exists()


@pytest.mark.long
def test_init_from_a_run_a_checkpoint_or_an_export_gives_the_same_start(shell, text):
    small, start = [*SMALL, "model.qk_norm=false"], shell.cwd / "start"
    shell.run(*RUN, *small, text, MAX, f"hydra.run.dir={start}")
    shell.run(f"run={start}", "out=exported", module="foundry.export")
    sources = {"run": start, "checkpoint": find(start), "export": shell.cwd / "exported"}
    # A transformers folder has its own tokenizer; use it in all runs, so that all read the same batches.
    few = [*RUN[:-2], text, "hparams.max_steps=2", "data.tokenizer=exported"]
    first = {}
    for name, path in sources.items():
        shell.run(*few, *small, f"model.init_from={path}", f"hydra.run.dir={name}")
        first[name] = losses(shell.cwd / name)[1]
    shell.run(*few, "model=hf", "model.path=exported", "hydra.run.dir=hf")
    shell.run(*few, *small, "hydra.run.dir=fresh")
    assert len(set(first.values())) == 1
    assert losses(shell.cwd / "hf")[1] == pytest.approx(first["run"], rel=1e-4)
    assert losses(shell.cwd / "fresh")[1] > first["run"] + 0.5
    sizes = json.loads((shell.cwd / "exported" / "config.json").read_text())
    rope = (
        f"++model.config.rope_parameters={{rope_type: default, rope_theta: {sizes['rope_parameters']['rope_theta']}}}"
    )
    own = [rope, *(f"++model.config.{name}={sizes[name]}" for name in LLAMA)]
    shell.run(*few, "model=hf_llama", *own, "model.init_from=exported", "hydra.run.dir=hf_llama")
    assert losses(shell.cwd / "hf_llama")[1] == pytest.approx(first["run"], rel=1e-4)


@pytest.mark.long
def test_init_from_refuses_weights_that_do_not_fit_and_writes_no_files(shell, text, finished):
    shell.run(f"run={finished}", "out=exported", module="foundry.export")
    for path in (finished, "exported"):
        overrides = [*RUN, *SMALL, text, MAX, "model.hidden_size=32", f"model.init_from={path}", "hydra.run.dir=run"]
        stdout, stderr = shell.run(*overrides, code=2)
        assert stdout == ""
        assert stderr.startswith("model.init_from: ")
        assert stderr.count("\n") == 1
        assert "(300, 32)" in stderr
        assert not (shell.cwd / "run").exists()


@pytest.mark.parametrize(
    "head_start", [pytest.param(0.0, marks=pytest.mark.long), pytest.param(0.3, marks=pytest.mark.long), None]
)
def test_a_second_process_in_the_run_directory_is_refused(shell, text, head_start):
    """The second process starts together with the first, during the startup of the first, or while the first trains."""
    overrides = [*RUN, *SMALL, text, LONG, "hydra.run.dir=run"]
    first = shell.start(*overrides)
    if head_start is None:
        shell.wait_for_steps(first, shell.cwd / "run", 3)
        os.kill(first.pid, signal.SIGSTOP)  # otherwise it might end before the second process checks the lock
    else:
        time.sleep(head_start)
    second = shell.start(*overrides)
    if head_start is None:
        second.wait(60)
        os.kill(first.pid, signal.SIGCONT)
    for process in (first, second):
        process.wait(60)
    refused, trained = sorted((first, second), key=lambda process: -process.returncode)
    stderr = shell.finish(refused, code=2)[1]
    assert stderr.startswith("hydra.run.dir: is ")
    assert "where another process trains" in stderr
    assert stderr.count("\n") == 1
    shell.finish(trained)
    run_dir = shell.cwd / "run"
    assert status(run_dir)["state"] == "finished"
    assert list(losses(run_dir)) == list(range(1, 201))
    assert (run_dir / "config.yaml").is_file()
    assert (run_dir / "tokenizer.json").is_file()


@pytest.mark.long
def test_run_without_checkpoints_starts_from_scratch(shell, go):
    overrides = [MAX, "checkpoint=none", "checkpoint.interval=null"]
    go(*overrides)
    assert not (shell.cwd / "run" / "checkpoints").exists()
    first = losses(shell.cwd / "run")
    (shell.cwd / "run" / "status.json").write_text(json.dumps({**status(shell.cwd / "run"), "state": "stopped"}))
    go(*overrides)
    assert losses(shell.cwd / "run") == first
    assert "finished run" in go(*overrides)[1]


@pytest.mark.parametrize("kind", some_of(CORRUPTIONS, next(iter(CORRUPTIONS))))
def test_resume_skips_a_corrupt_checkpoint_and_names_it(broken_off, go, finished, kind):
    name, corrupt = CORRUPTIONS[kind]
    newest, before = list_checkpoints(broken_off)[:2]
    corrupt(newest / name)
    stdout, stderr = go(MAX)
    (line,) = [line for line in stderr.splitlines() if "is damaged and not used" in line]
    assert newest.name in line
    assert name in line
    assert f"after step {before.name.removeprefix('step_').lstrip('0')}" in stdout
    assert outcome(broken_off) == outcome(finished)
    assert all(problems(folder) == [] for folder in list_checkpoints(broken_off))
    assert (newest.parent / f"{newest.name}.corrupt").is_dir()


@pytest.mark.long
def test_resume_is_refused_if_all_checkpoints_are_corrupt(broken_off, go):
    folders, before = list_checkpoints(broken_off), losses(broken_off)
    for folder in folders:
        flip(folder / "shard-00000.safetensors")
    for _ in range(2):
        stderr = go(MAX, code=2)[1]
        (line,) = [line for line in stderr.splitlines() if line.startswith("checkpoint.resume: is auto")]
        assert all(folder.name in line for folder in folders)
        assert "to start from scratch, move that folder away" in line
        assert list_checkpoints(broken_off) == folders
        assert losses(broken_off) == before
    (broken_off / "checkpoints").rename(broken_off / "old")
    go(MAX)
    assert losses(broken_off) == before


def interrupt_again_and_again(shell, overrides, run_dir):
    """Stop a run by SIGTERM, SIGINT and SIGUSR1 (scheduler, Ctrl-C, scheduler warning) in turn, then let it finish."""
    done = 0
    for number, send, code in (
        (signal.SIGTERM, kill_all, 143),
        (signal.SIGINT, kill, 130),
        (signal.SIGUSR1, kill_all, 138),
    ):
        process = shell.start(*overrides)
        shell.wait_for_steps(process, run_dir, done + 5)
        send(process, number)
        stdout, stderr = shell.finish(process, code=code)
        assert "Traceback" not in stdout + stderr
        assert f"stopped by {number.name} after step" in stderr
        assert (status(run_dir)["state"], status(run_dir)["reason"]) == ("stopped", number.name)
        assert f"step_{status(run_dir)['step']:08d}" == find(run_dir).name
        done = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    shell.run(*overrides)
    assert status(run_dir)["state"] == "finished"


@pytest.mark.long
def test_run_stopped_by_signals_resumes_bit_for_bit(shell, text):
    overrides = [*RUN, *SMALL, text, LONG, "data.num_workers=1"]
    shell.run(*overrides, "hydra.run.dir=whole")
    interrupt_again_and_again(shell, [*overrides, "hydra.run.dir=run"], shell.cwd / "run")
    assert outcome(shell.cwd / "run") == outcome(shell.cwd / "whole")


def test_run_killed_twice_resumes_bit_for_bit(shell, text):
    overrides, run_dir, done = [*RUN, *SMALL, text, LONG], shell.cwd / "run", 0
    shell.run(*overrides, "hydra.run.dir=whole")
    for _ in range(2):
        process = shell.start(*overrides, "hydra.run.dir=run")
        shell.wait_for_steps(process, run_dir, done + 15)
        kill(process, signal.SIGKILL)
        shell.finish(process, code=-signal.SIGKILL)
        done = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    shell.run(*overrides, "hydra.run.dir=run")
    assert outcome(run_dir) == outcome(shell.cwd / "whole")


@pytest.mark.long
@pytest.mark.distributed
def test_run_of_two_processes_stopped_by_signals_resumes_bit_for_bit(shell, text):
    overrides = [*RUN, *SMALL, text, "hparams.max_steps=160", "distributed=fsdp", "distributed.nproc_per_node=2"]
    shell.run(*overrides, "hydra.run.dir=whole")
    interrupt_again_and_again(shell, [*overrides, "hydra.run.dir=run"], shell.cwd / "run")
    assert outcome(shell.cwd / "run") == outcome(shell.cwd / "whole")


@pytest.mark.long
def test_closed_terminal_stops_the_run_with_a_checkpoint(cold_shell, text):
    """After the terminal has closed, each write to it raises an input/output error."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "foundry", *RUN, *SMALL, text, "hparams.max_steps=5000", "hydra.run.dir=run"],
        cwd=cold_shell.cwd,
        env=cold_shell.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(theirs)
        seen = b""
        while b"step " not in seen:
            seen += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(60) == 129
    run_dir = cold_shell.cwd / "run"
    assert (status(run_dir)["state"], status(run_dir)["reason"]) == ("stopped", "SIGHUP")
    assert f"step_{status(run_dir)['step']:08d}" == find(run_dir).name
