"""A run directory on a disk that fills up."""

import contextlib
import os
import subprocess

import pytest
from outcome import losses, status
from warm import WarmShell

from foundry.checkpoint.folder import list_checkpoints, problems

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a small disk"),
]

# A checkpoint of this model takes about 180 kB.
WORDS = [
    "data=text",
    "data.path=text.txt",
    "data.seq_len=16",
    "data.vocab_size=300",
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "evaluation.max_samples=8",
    "evaluation.write_samples=false",
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=4",
    "hparams.max_steps=40",
    "precision=fp32",
    "checkpoint.interval=10",
    "checkpoint.keep_last=9",
    "hydra.run.dir=small/run",
]


@pytest.fixture
def disk(tmp_path):
    """A file system of 400 kB, and how to resize it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk: {mounted.stderr.decode().strip()}")
    yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def shell(tmp_path, cache, disk):
    (tmp_path / "text.txt").write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(2000)))
    return WarmShell(tmp_path, cache)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_training_goes_on_and_the_old_checkpoint_stays(shell, disk, asynchronous):
    run_dir = shell.cwd / "small" / "run"
    stderr = shell.run(*WORDS, f"checkpoint.asynchronous={asynchronous}")[1]
    (first,) = list_checkpoints(run_dir)
    assert first.name == "step_00000010"
    assert problems(first) == []
    failed = [line for line in stderr.splitlines() if "ERROR" in line and "No space left on device" in line]
    assert [line.partition("no checkpoint of ")[2].split(" at ")[0] for line in failed] == [
        "step 20",
        "step 30",
        "step 40",
    ]
    assert not list((run_dir / "checkpoints").glob(".step_*"))
    assert status(run_dir)["state"] == "finished"
    assert list(losses(run_dir)) == list(range(1, 41))
    assert failed[-1] == stderr.splitlines()[-1]


def test_strict_saves_end_the_run_which_goes_on_when_there_is_room(shell, disk):
    run_dir = shell.cwd / "small" / "run"
    stderr = shell.run(*WORDS, "checkpoint.strict_saves=true", code=1)[1]
    assert "SaveError: no checkpoint of step 20" in stderr
    assert "No space left on device" in stderr
    assert status(run_dir)["state"] == "failed"
    assert "SaveError" in status(run_dir)["reason"]
    disk("8m")
    assert "after step 10" in shell.run(*WORDS, "checkpoint.strict_saves=true")[0]
    assert [folder.name[-2:] for folder in list_checkpoints(run_dir)] == ["40", "30", "20", "10"]
    assert list(losses(run_dir)) == list(range(1, 41))


def test_a_disk_without_a_byte_left_costs_records_and_not_the_run(shell, disk):
    run_dir, words = shell.cwd / "small" / "run", [*WORDS, "hparams.max_steps=400"]
    process = shell.start(*words)
    shell.wait_for_steps(process, run_dir, 20)
    with (run_dir.parent / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(bytes(4096)):
            pass
    stderr = shell.finish(process)[1]
    assert "No space left on device" in stderr
    (run_dir.parent / "ballast").unlink()
    assert all(problems(folder) == [] for folder in list_checkpoints(run_dir))
    assert "goes on" in shell.run(*words)[0]
    assert status(run_dir)["state"] == "finished"
    assert losses(run_dir)[400] > 0
