"""Synchronous and asynchronous saves, and their failures."""

import logging
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from support.checkpoint_parts import KNOWN, Net, assert_same, saver, write
from support.devices import DEVICES, device_of
from torch.optim import AdamW

from foundry.checkpoint import writer as writer_module
from foundry.checkpoint.folder import problems
from foundry.checkpoint.saver import SaveError
from foundry.checkpoint.shard import write_shard
from foundry.checkpoint.tensors import collect, load_weights, restore_into
from foundry.run_dir.checkpoints import find, list_checkpoints
from foundry.run_dir.lock import RunDirectoryLostError


def ask(checkpointer, step, tensors, **options):
    checkpointer.write(step, tensors=tensors, manifest=KNOWN, rank_state={}, **options)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*-*")}


def test_asynchronous_save_is_a_snapshot_unaffected_by_training(tmp_path, monkeypatch):
    model = Net(1)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    expected = write(tmp_path / "sync", 3, model, optimizers=[optimizer])
    kept = {name: tensor.clone() for name, tensor in collect(model, None, [optimizer]).items()}
    changed = threading.Event()

    def late(path, chunks, alive):
        assert changed.wait(10)
        return write_shard(path, chunks)

    monkeypatch.setattr(writer_module, "write_shard", late)
    checkpointer = saver(tmp_path / "async", asynchronous=True)
    write(tmp_path / "async", 3, model, optimizers=[optimizer], checkpointer=checkpointer, wait=False)
    assert checkpointer.pending
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    changed.set()
    checkpointer.finish()
    assert not checkpointer.pending
    folder = find(tmp_path / "async")
    assert files(folder) == files(expected)
    fresh = AdamW(model.parameters(), lr=0.1)
    restore_into(folder, model, None, [fresh])
    assert_same(collect(model, None, [fresh]), kept)


def test_save_does_not_create_a_run_directory_that_is_deleted_after_its_check(tmp_path):
    run_dir, checks = tmp_path / "run", []

    def check():
        checks.append(run_dir.exists())
        if not checks[-1]:
            raise RunDirectoryLostError(run_dir)
        shutil.rmtree(run_dir)

    checkpointer = saver(run_dir, check_run_dir=check)
    with pytest.raises(SaveError, match="was deleted, moved or replaced"):
        write(run_dir, 3, Net(1), checkpointer=checkpointer)
    assert checks == [True, False]
    assert not run_dir.exists()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_awaited_save_does_not_copy_host_memory(asynchronous, device, tmp_path, monkeypatch):
    """Of awaited saves, only asynchronous ones from a GPU copy the tensors, to pinned memory."""
    written = {}

    def watched(path, chunks, alive):
        written.update((name, chunk.local) for name, chunk in chunks.items())
        return write_shard(path, chunks)

    monkeypatch.setattr(writer_module, "write_shard", watched)
    model = Net(1).to(device_of(device))
    ask(saver(tmp_path, asynchronous=asynchronous), 1, model.state_dict, wait=True)
    is_pinned = device == "cuda" and asynchronous
    for name, tensor in model.state_dict().items():
        assert (written[name].data_ptr() == tensor.data_ptr()) != is_pinned
        assert written[name].is_pinned() == is_pinned
        assert torch.equal(written[name].cpu(), tensor.cpu())


def test_save_waits_for_the_previous_save(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "foundry")
    begun, going = [], threading.Event()

    def slow(path, chunks, alive):
        begun.append(path.parent.name)
        assert going.wait(10)
        return write_shard(path, chunks)

    monkeypatch.setattr(writer_module, "write_shard", slow)
    checkpointer, model = saver(tmp_path, asynchronous=True), Net(1)
    ask(checkpointer, 1, model.state_dict)
    threading.Timer(0.2, going.set).start()
    ask(checkpointer, 2, model.state_dict)
    assert checkpointer.blocked_seconds > 0.1
    assert "step 2 waited" in caplog.text
    checkpointer.finish()
    assert begun == [".step_00000001.partial", ".step_00000002.partial"]
    assert [f.name for f in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000001"]


def test_checkpoints_outside_the_retention_policy_are_deleted(tmp_path):
    checkpointer, model = saver(tmp_path, keep_last=2, keep_every_steps=4), Net(1)
    for step in range(1, 10):
        ask(checkpointer, step, model.state_dict, is_best=step == 3)
    there = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert there == ["best", "latest", *(f"step_{step:08d}" for step in (3, 4, 8, 9))]
    assert find(tmp_path, "best").name == "step_00000003"


def test_close_writes_the_pending_save_and_ends_the_thread(tmp_path):
    threads = set(threading.enumerate())
    checkpointer = saver(tmp_path, asynchronous=True)
    write(tmp_path, 1, Net(1), checkpointer=checkpointer, wait=False)
    checkpointer.close()
    assert find(tmp_path).name == "step_00000001"
    assert set(threading.enumerate()) <= threads


@contextmanager
def mounted(folder, *options):
    """Mount a tmpfs on the folder; skip the test if that fails."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_loses_one_checkpoint_only(tmp_path, asynchronous, caplog):
    with mounted(tmp_path / "disk", "-o", "size=512k") as run_dir:
        checkpointer = saver(run_dir, asynchronous=asynchronous, strict=False)
        ask(checkpointer, 1, lambda: {"a": torch.ones(50_000)})
        ask(checkpointer, 2, lambda: {"a": torch.ones(100_000)})
        checkpointer.join()
        (message,) = errors(caplog)
        assert "no checkpoint of step 2 at " + str(run_dir / "checkpoints" / "step_00000002") in message
        assert "No space left on device" in message
        assert checkpointer.failed_saves == 1
        assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["latest", "step_00000001"]
        assert problems(find(run_dir)) == []
        ask(checkpointer, 3, lambda: {"a": torch.ones(50_000)})
        checkpointer.finish()
        assert find(run_dir).name == "step_00000003"
        assert checkpointer.failed_saves == 1
        with pytest.raises(SaveError, match=r"no checkpoint of step 4 .*No space left on device"):
            ask(checkpointer, 4, lambda: {"a": torch.ones(100_000)}, wait=True)
        ask(checkpointer, 5, lambda: {"a": torch.ones(100_000)})
        with pytest.raises(SaveError, match=r"no checkpoint of step 5 .*No space left on device"):
            checkpointer.finish()
        assert find(run_dir).name == "step_00000003"


def test_read_only_folder_is_reported_and_later_saves_succeed(tmp_path, caplog):
    with mounted(tmp_path / "disk") as run_dir:
        checkpointer = saver(run_dir, strict=False)
        ask(checkpointer, 1, Net(1).state_dict)
        remount(run_dir, "ro")
        ask(checkpointer, 2, Net(1).state_dict)
        assert "Read-only file system" in errors(caplog)[0]
        assert find(run_dir).name == "step_00000001"
        remount(run_dir, "rw")
        ask(checkpointer, 3, Net(1).state_dict)
        assert find(run_dir).name == "step_00000003"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_strict_saver_raises_at_the_next_call(tmp_path, asynchronous):
    (tmp_path / "checkpoints").write_text("in the way")
    checkpointer = saver(tmp_path, asynchronous=asynchronous)
    ask(checkpointer, 1, Net(1).state_dict)
    with pytest.raises(SaveError, match=r"no checkpoint of step 1 at .*step_00000001: rank 0: UnsafeFileError"):
        ask(checkpointer, 2, Net(1).state_dict)
    with pytest.raises(SaveError, match="no checkpoint of step 3"):
        ask(checkpointer, 3, Net(1).state_dict, wait=True)
    ask(checkpointer, 4, Net(1).state_dict)
    with pytest.raises(SaveError, match="no checkpoint of step 4"):
        checkpointer.finish()
    checkpointer.finish()


def test_interrupted_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, 5, Net(5))

    def interrupted(partial, manifest):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(saver(tmp_path), 10, Net(10).state_dict)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_00000005", ".step_00000010.partial", "latest"}
    assert find(tmp_path).name == "step_00000005"
    write(tmp_path, 10, Net(10))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_00000005", "step_00000010", "latest"}
    model = Net(0)
    load_weights(find(tmp_path), model)
    assert_same(model.state_dict(), Net(10).state_dict())


def test_only_an_awaited_save_sends_heartbeats(tmp_path, monkeypatch):
    beats, going = [], threading.Event()

    def late(path, chunks, alive):
        assert going.wait(10)
        return write_shard(path, chunks, alive)

    monkeypatch.setattr(writer_module, "write_shard", late)
    checkpointer = saver(tmp_path, asynchronous=True, alive=lambda: beats.append(threading.current_thread()))
    ask(checkpointer, 1, Net(1).state_dict)
    going.set()
    while checkpointer.pending:
        time.sleep(0.01)
    assert beats == []
    ask(checkpointer, 2, Net(1).state_dict, wait=True)
    assert len(beats) == 1 + len(Net(1).state_dict())  # One for the header, and one for each tensor.
