"""Threads that copy checkpoints to a store: outages, retention, several ranks and a lost lease."""

import logging
import shutil
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from support.checkpoint_parts import KNOWN, saver
from support.object_store import BUCKET, Proxy, environment, s3_server

from foundry.checkpoint.folder import Manifest, partial_path, problems, publish, write_durably
from foundry.checkpoint.mirror import thread as mirror_thread
from foundry.checkpoint.mirror.main import MainMirror, MirrorState
from foundry.checkpoint.mirror.rank import RankMirror
from foundry.checkpoint.mirror.thread import MirroredRun
from foundry.engine.mirror import _check_only_mirrors, _release
from foundry.run_dir.lock import lock
from foundry.run_dir.mirror.fetching import fetch_checkpoint
from foundry.run_dir.mirror.lease import LEASE, Lease
from foundry.run_dir.mirror.snapshot import LATEST, list_published, read_published, read_snapshot
from foundry.run_dir.mirror.store import Store, StoreError


@pytest.fixture
def run_dir(tmp_path):
    with ExitStack() as stack:
        assert lock(tmp_path / "run", stack)
        yield tmp_path / "run"


@pytest.fixture
def store(tmp_path):
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def polls(monkeypatch):
    """Let ranks look for announcements and files of other ranks often."""
    monkeypatch.setattr(mirror_thread, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(mirror_thread, "_LONGEST_POLL_SECONDS", 0.05)


def mirror_of(store, run_dir, *, world_size=1, seconds=60.0, state=None, **options):
    lease = Lease(store)
    lease.take()
    default = {"identity": {"run.json": b"{}"}, "keep_last": 2, "keep_every_steps": None}
    state = state or MirrorState(run="r", published=read_published(store, "r")[0])
    run = MirroredRun(store=store, run_dir=run_dir, world_size=world_size, seconds=seconds)
    return MainMirror(run, state, lease, **default | options)


def mirror_of_rank_1(store, run_dir, damaged=()):
    return RankMirror(MirroredRun(store=store, run_dir=run_dir, world_size=2, seconds=60), 1, damaged)


def save(checkpointer, step, best=None):
    manifest = {**KNOWN, "state": {"best": {"step": best}}}
    tensors = {"a": torch.full((1000,), float(step))}
    checkpointer.write(step, tensors=lambda: tensors, manifest=manifest, rank_state={}, is_best=best == step)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def intact(store, tmp_path):
    """Fetch every published checkpoint into a new directory, and return the steps, which are all intact."""
    folder = tmp_path / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    snapshots, damaged = read_published(store, "r")
    assert damaged == {}
    for snapshot in snapshots.values():
        assert problems(fetch_checkpoint(store, snapshot, folder)) == []
    return sorted(snapshots)


def test_store_keeps_the_checkpoints_that_the_run_keeps(store, run_dir, tmp_path):
    options = {"keep_last": 2, "keep_every_steps": 4}
    mirror = mirror_of(store, run_dir, **options)
    checkpointer = saver(run_dir, mirror=mirror, **options)
    mirror.start()
    for step in range(1, 11):
        save(checkpointer, step, best=min(step, 3))
        wait_until(lambda: step in list_published(store))  # noqa: B023
    mirror.close()
    assert intact(store, tmp_path) == [3, 4, 8, 9, 10]
    assert sorted(store.names("checkpoints")) == [f"step_{step:08d}" for step in (3, 4, 8, 9, 10)]
    assert LEASE not in store.names("")


def test_checkpoint_that_is_copied_is_not_deleted_and_saves_do_not_wait(store, run_dir, tmp_path, monkeypatch):
    is_open, begun = threading.Event(), threading.Event()
    upload = Store.upload

    def slow(self, file, name, size):
        begun.set()
        assert is_open.wait(60)
        upload(self, file, name, size)

    monkeypatch.setattr(Store, "upload", slow)
    mirror = mirror_of(store, run_dir, keep_last=1)
    checkpointer = saver(run_dir, mirror=mirror, keep_last=1)
    save(checkpointer, 1)
    mirror.start()
    assert begun.wait(60)
    for step in (2, 3, 4):
        save(checkpointer, step)
    assert mirror.held_step == 1
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")) == ["step_00000001", "step_00000004"]
    is_open.set()
    mirror.close()
    assert intact(store, tmp_path) == [4]


@pytest.mark.long
def test_outage_is_one_warning_and_is_caught_up_on(run_dir, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mirror_thread, "_FIRST_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(mirror_thread, "_LONGEST_DELAY_SECONDS", 0.1)
    caplog.set_level(logging.INFO, "foundry")
    with s3_server() as server:
        proxy = Proxy(server.port)
        for name, value in environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        store = Store(f"s3://{BUCKET}/run")
        mirror = mirror_of(store, run_dir)
        checkpointer = saver(run_dir, mirror=mirror, keep_last=2)
        mirror.start()
        save(checkpointer, 1)
        wait_until(lambda: list_published(store) == [1])
        for step, limit in ((2, 600), (3, 3000), (4, 0)):
            proxy.limit = limit  # the connection ends within the object
            if limit == 0:
                proxy.cut()
            save(checkpointer, step)
            wait_until(lambda: "the copy to" in caplog.text)
        time.sleep(0.3)
        warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len([message for message in warnings if message.startswith(f"the copy to s3://{BUCKET}/run waits")]) == 1
        proxy.restore()
        wait_until(lambda: "can be written again" in caplog.text)
        mirror.close()
        assert intact(store, tmp_path) == [3, 4]
        assert LEASE not in store.names("")
        assert (checkpointer.failed_saves, mirror.held_step) == (0, None)


def test_close_waits_no_longer_than_its_limit(store, run_dir, monkeypatch, caplog):
    def fail(self, *arguments):
        raise StoreError("down")

    monkeypatch.setattr(mirror_thread, "_FIRST_DELAY_SECONDS", 0.01)
    mirror = mirror_of(store, run_dir, seconds=0.2)
    monkeypatch.setattr(Store, "write", fail)
    mirror.start()
    mirror.close()
    assert "the copy to file://" in caplog.text
    assert "is incomplete after 0.2 s (checkpoint.mirror_seconds)" in caplog.text


def test_deletions_that_an_outage_prevents_are_caught_up_on(store, run_dir, tmp_path, monkeypatch, polls):
    failures, remove = [StoreError("down")] * 2, Store.remove

    def fail(self, *names):
        if failures and list_published(self) == [2, 1]:
            raise failures.pop()
        remove(self, *names)

    monkeypatch.setattr(mirror_thread, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(Store, "remove", fail)
    store.write("files/metrics.jsonl.0", b"left by a process that was killed")
    mirror = mirror_of(store, run_dir, keep_last=1)
    checkpointer = saver(run_dir, mirror=mirror, keep_last=1)
    mirror.start()
    for step in (1, 2):
        save(checkpointer, step)
        wait_until(lambda: step in list_published(store))  # noqa: B023
    mirror.close()
    assert not failures
    assert intact(store, tmp_path) == [2]
    assert store.names("checkpoints") == ["step_00000002"]
    assert "metrics.jsonl.0" not in store.sizes("files")


def test_published_checkpoint_stays_until_a_newer_one_is_published(store, run_dir, tmp_path, monkeypatch):
    mirror = mirror_of(store, run_dir, keep_last=1)
    checkpointer = saver(run_dir, keep_last=1)
    save(checkpointer, 1)
    write_latest, is_published = mirror._write_latest, []

    def save_meanwhile():
        write_latest()
        if not is_published:
            is_published.append(list_published(store))
            save(checkpointer, 2)

    monkeypatch.setattr(mirror, "_write_latest", save_meanwhile)
    monkeypatch.setattr(mirror, "_next_step", iter([1, None, None]).__next__)
    mirror._copy()
    assert is_published == [[1]]
    assert intact(store, tmp_path) == [1]


def test_nothing_is_written_to_a_folder_that_is_not_mounted(store, run_dir, tmp_path):
    mirror = mirror_of(store, run_dir)
    checkpointer = saver(run_dir, mirror=mirror)
    save(checkpointer, 1)
    mirror._copy()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    save(checkpointer, 2)
    with pytest.raises(StoreError, match="is it mounted"):
        mirror._copy()
    assert not (tmp_path / "store").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    mirror._copy()
    assert intact(store, tmp_path) == [1, 2]


def test_thread_that_is_not_awaited_ends_without_an_error(store, run_dir, monkeypatch, caplog):
    is_open, begun, upload = threading.Event(), threading.Event(), Store.upload

    def slow(self, file, name, size):
        begun.set()
        assert is_open.wait(60)
        upload(self, file, name, size)

    monkeypatch.setattr(Store, "upload", slow)
    mirror = mirror_of(store, run_dir, seconds=0.01)
    save(saver(run_dir, mirror=mirror), 1)
    mirror.start()
    assert begun.wait(60)
    mirror.close()
    is_open.set()
    mirror._thread.join(60)
    assert list_published(store) == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # the copy is incomplete


def test_store_with_the_rest_of_an_interrupted_write_counts_as_empty(store):
    store.write(".0123.partial", b"{")
    assert _check_only_mirrors(store)


def test_store_that_hangs_does_not_delay_the_end_of_a_refused_run(store, monkeypatch):
    is_over, waits = threading.Event(), []
    monkeypatch.setattr(Lease, "release", lambda self: waits.append(is_over.wait(60)))
    lease = Lease(store)
    lease.take()
    _release(lease, 0.01)
    assert waits == []
    is_over.set()
    assert not lease.check()


@pytest.mark.parametrize("lease", [b'{"token": "another"}', None])
def test_process_that_lost_its_lease_writes_nothing_more(store, run_dir, caplog, lease):
    mirror = mirror_of(store, run_dir)
    checkpointer = saver(run_dir, mirror=mirror)
    mirror.start()
    save(checkpointer, 1)
    wait_until(lambda: list_published(store) == [1])
    if lease is None:  # the other process has given it back
        store.remove(LEASE)
    else:
        store.write(LEASE, lease)
    save(checkpointer, 2)
    mirror.close()
    assert list_published(store) == [1]
    assert (store.read(LEASE) if store.size(LEASE) else None) == lease
    assert "another process has written to" in caplog.text


def test_lost_directory_leaves_the_store_as_it_was(store, run_dir, tmp_path):
    mirror = mirror_of(store, run_dir)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    checkpointer = saver(run_dir, mirror=mirror)
    mirror.start()
    save(checkpointer, 1)
    wait_until(lambda: list_published(store) == [1] and store.size("latest.json"))
    before = {name: store.read(name) for name in store.sizes("") if name not in (LEASE, LATEST)}
    shutil.rmtree(run_dir)
    mirror.notify()
    mirror.close()
    assert {name: store.read(name) for name in store.sizes("") if name != LATEST} == before
    assert "metrics.jsonl" in read_snapshot(store, LATEST, "r").files
    assert intact(store, tmp_path) == [1]


def test_damaged_local_checkpoint_is_reported_and_not_copied(store, run_dir, tmp_path, caplog):
    checkpointer = saver(run_dir)
    save(checkpointer, 1)
    save(checkpointer, 2)
    shard = run_dir / "checkpoints" / "step_00000002" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    mirror = mirror_of(store, run_dir)
    mirror.start()
    mirror.close()
    assert intact(store, tmp_path) == [1]
    assert "step_00000002 is not copied to" in caplog.text


def save_of_two_ranks(run_dir, step, content=""):
    partial = partial_path(run_dir, step)
    partial.mkdir(parents=True)
    names = ("shard-00000.safetensors", "rank-00000.json", "shard-00001.safetensors", "rank-00001.json")
    files = {name: write_durably(partial / name, f"{name} {step} {content}") for name in names}
    publish(partial, Manifest(step=step, world_size=2, files=files))


def test_rank_0_publishes_after_the_other_rank_has_copied(store, run_dir, tmp_path, polls):
    save_of_two_ranks(run_dir, 1)
    main = mirror_of(store, run_dir, world_size=2)
    other = mirror_of_rank_1(store, run_dir)
    main.start()
    wait_until(lambda: len(store.sizes("checkpoints/step_00000001")) == 4)
    assert list_published(store) == []
    other.start()
    main.close()
    other.close()
    assert intact(store, tmp_path) == [1]


@pytest.mark.parametrize("is_stale", [False, True])
def test_other_rank_copies_older_and_damaged_checkpoints(store, run_dir, tmp_path, polls, is_stale):
    for step in (1, 2, 3):
        save_of_two_ranks(run_dir, step)
    for name in ("published.json", *(["begun.json"] if is_stale else [])):
        store.write(f"checkpoints/step_00000002/{name}", b"damaged")
    main = mirror_of(store, run_dir, world_size=2, keep_last=3, state=MirrorState(run="r", damaged={2}))
    other = mirror_of_rank_1(store, run_dir, damaged={2})
    other.start()
    wait_until(lambda: not other._wakeup.is_set())
    main.start()
    wait_until(lambda: list_published(store) == [3, 2, 1])
    main.close()
    other.close()
    assert intact(store, tmp_path) == [1, 2, 3]
    assert all("begun.json" not in store.sizes(f"checkpoints/step_{step:08d}") for step in (1, 2, 3))


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoint_that_the_run_saved_anew_replaces_the_one_in_the_store(store, run_dir, tmp_path, polls, world_size):
    for content in ("first", "second"):
        save_of_two_ranks(run_dir, 1, content)
        threads = [mirror_of(store, run_dir, world_size=world_size)]
        if world_size == 2:
            threads.append(mirror_of_rank_1(store, run_dir))
        for thread in reversed(threads):
            thread.start()
        for thread in threads:
            thread.close()
        assert intact(store, tmp_path) == [1]
        restored = tmp_path / "fetched" / "checkpoints" / "step_00000001" / "rank-00001.json"
        assert restored.read_text() == f"rank-00001.json 1 {content}"
        assert len(store.sizes("checkpoints/step_00000001")) == 6
        shutil.rmtree(run_dir / "checkpoints" / "step_00000001")


def test_result_is_copied_only_after_the_last_checkpoint(store, run_dir, monkeypatch):
    is_open, begun, publish_object = threading.Event(), threading.Event(), Store.write

    def slow(self, name, content):
        if name.endswith("step_00000001/published.json"):
            begun.set()
            assert is_open.wait(60)
        if name.endswith("step_00000002/published.json"):
            raise StoreError("killed before the last checkpoint was published")
        publish_object(self, name, content)

    monkeypatch.setattr(Store, "write", slow)
    mirror = mirror_of(store, run_dir, seconds=1)
    checkpointer = saver(run_dir, mirror=mirror)
    save(checkpointer, 1)
    (run_dir / "result.json").write_text("{}")
    (run_dir / "status.json").write_text("running")
    mirror.start()
    assert begun.wait(60)
    save(checkpointer, 2)
    (run_dir / "status.json").write_text("finished")
    is_open.set()
    mirror.close()
    snapshots = [read_snapshot(store, LATEST, "r"), read_published(store, "r")[0][1]]
    assert [snapshot.step for snapshot in snapshots] == [1, 1]
    for snapshot in snapshots:
        assert "result.json" not in snapshot.files
        assert "status.json" not in snapshot.files


def save_on_two_disks(first, second, step, content=""):
    """Save a checkpoint of two ranks on two disks: each has the manifest and the files of one rank."""
    save_of_two_ranks(first, step, content)
    folder = first / "checkpoints" / f"step_{step:08d}"
    shutil.copytree(folder, second / folder.relative_to(first), dirs_exist_ok=True)
    for disk, rank in ((first, 1), (second, 0)):
        for name in (f"shard-0000{rank}.safetensors", f"rank-0000{rank}.json"):
            (disk / folder.relative_to(first) / name).unlink()


def test_ranks_on_local_disks_copy_their_files(store, run_dir, tmp_path, polls):
    for step in (1, 2):
        save_on_two_disks(run_dir, tmp_path / "other", step)
    main = mirror_of(store, run_dir, world_size=2)
    other = mirror_of_rank_1(store, tmp_path / "other")
    main.start()
    wait_until(lambda: len(store.sizes("checkpoints/step_00000002")) == 4)
    assert list_published(store) == []
    assert main.held_step == 2
    other.start()
    main.close()
    other.close()
    assert intact(store, tmp_path) == [1, 2]
    assert list_published(store) == [2, 1]


def test_rank_does_not_copy_files_of_another_checkpoint_of_the_same_step(store, run_dir, tmp_path, polls):
    save_on_two_disks(run_dir, tmp_path / "other", 1, "old")
    shutil.rmtree(run_dir / "checkpoints")
    save_on_two_disks(run_dir, tmp_path / "newer", 1, "new")
    main = mirror_of(store, run_dir, world_size=2)
    other = mirror_of_rank_1(store, tmp_path / "other")
    main.start()
    other.start()
    wait_until(lambda: len(store.sizes("checkpoints/step_00000001")) == 4)
    other.notify()
    wait_until(lambda: not other._wakeup.is_set())
    assert not [name for name in store.sizes("checkpoints/step_00000001") if "00001" in name]
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    (tmp_path / "newer" / "checkpoints").rename(tmp_path / "other" / "checkpoints")
    other.notify()
    main.close()
    other.close()
    assert intact(store, tmp_path) == [1]
    assert (tmp_path / "fetched/checkpoints/step_00000001/rank-00001.json").read_text() == "rank-00001.json 1 new"


def test_checkpoint_that_another_disk_lacks_is_left_out_and_delays_no_other(store, run_dir, tmp_path, polls, caplog):
    for step in (1, 2, 3):
        save_on_two_disks(run_dir, tmp_path / "other", step)
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "step_00000002")
    (tmp_path / "other" / "checkpoints" / "step_00000001" / "shard-00001.safetensors").unlink()
    main = mirror_of(store, run_dir, world_size=2, keep_last=3)
    other = mirror_of_rank_1(store, tmp_path / "other")
    assert sorted(main.copyable()) == [1, 2, 3]
    assert other.copyable() == {3: main.copyable()[3]}
    main.leave_out([1, 2])
    main.start()
    other.start()
    main.close()
    other.close()
    assert intact(store, tmp_path) == [3]
    assert "step 2 is not copied to" in caplog.text
    assert LEASE not in store.names("")
