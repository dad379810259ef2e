"""Objects of a mirror: stores, snapshots, leases, copies of small files, and their verification on the way back."""

import json
import math
import os
import random
import shutil
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples, some_of
from support.object_store import store_url

from foundry.run_dir.mirror import lease as lease_module
from foundry.run_dir.mirror import store as store_module
from foundry.run_dir.mirror.copying import Copier, small_files
from foundry.run_dir.mirror.fetching import fetch_checkpoint, fetch_file, fetch_small_files
from foundry.run_dir.mirror.lease import LEASE, Lease, LeaseHeldError
from foundry.run_dir.mirror.reading import NoRunError, fetch_run, fetch_runs
from foundry.run_dir.mirror.snapshot import (
    DamagedMirrorError,
    Part,
    Snapshot,
    checksum_of,
    decode,
    list_published,
    read_published,
    read_snapshot,
)
from foundry.run_dir.mirror.store import MissingObjectError, Store, StoreError, why_not_a_store


@pytest.fixture(scope="module", params=["file", "memory", "s3"])
def url(request, tmp_path_factory):
    with store_url(request.param, tmp_path_factory.mktemp("stores")) as url:
        yield url


@pytest.fixture
def store(url, request):
    return Store(f"{url}/{request.node.name}")


@pytest.fixture
def local(tmp_path):
    return Store(f"file://{tmp_path / 'store'}")


def test_store_reads_what_it_wrote_and_lists_it(store, tmp_path):
    assert (store.names(""), store.sizes(""), store.size("a")) == ([], {}, None)
    (tmp_path / "big").write_bytes(os.urandom(70_000))
    store.write("folder/deep/a", b"one")
    store.write("empty", b"")
    store.upload(tmp_path / "big", "folder/big", 70_000)
    store.write("folder/deep/a", b"two!")
    assert store.read("folder/deep/a") == b"two!"
    assert store.names("") == ["empty", "folder"]
    assert store.sizes("folder") == {"big": 70_000, "deep/a": 4}
    assert store.size("empty") == 0
    store.download("folder/big", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "big").read_bytes()
    store.remove("empty", "missing")
    store.remove_folder("folder")
    assert store.sizes("") == {}
    with pytest.raises(MissingObjectError):
        store.read("folder/big")
    with pytest.raises(MissingObjectError):
        store.download("folder/big", tmp_path / "none")


def test_upload_of_another_size_than_expected_is_an_error(store, tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(StoreError, match="has 5 bytes after writing 6"):
        store.upload(tmp_path / "file", "x", 6)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("runs/a", "not a URL"),
        ("simplecache::s3://bucket/a", "not a URL"),
        ("s3://user:pass@bucket/a", "user name or password"),
        ("s3://bucket/a?key=SECRET", "query"),
        ("s3://", "no path"),
        ("file:///", "no path"),
        ("s3://bucket/a", None),
        ("memory://a", None),
        ("file:///a/b", None),
    ],
)
def test_url_is_refused_with_a_reason(url, reason):
    assert (why_not_a_store(url) is None) if reason is None else reason in why_not_a_store(url)


def test_error_of_a_store_hides_secrets_of_the_environment(local, monkeypatch):
    monkeypatch.setenv("MY_SECRET_KEY", "hunter2hunter2")

    def fail(path):
        raise RuntimeError(f"bad signature of hunter2hunter2 at https://user:word@host/{path}")

    local.write("a", b"content")
    monkeypatch.setattr(local._system, "cat_file", fail)
    with pytest.raises(StoreError) as caught:
        local.read("a")
    assert "hunter2" not in str(caught.value)
    assert "word" not in str(caught.value)


SNAPSHOT = Snapshot(
    run="r",
    step=3,
    best=2,
    checkpoint={
        "a": Part("checkpoints/step_00000003/a.1", 1, "1"),
        "manifest.json": Part("checkpoints/step_00000003/manifest.json.4", 1, "4"),
    },
    files={"b/c": (Part("files/b/c.2", 2, "2"), Part("files/b/c.3", 1, "3"))},
    number=7,
)


def test_snapshot_is_read_back():
    assert decode(SNAPSHOT.encode()) == SNAPSHOT
    assert SNAPSHOT.objects == {"files/b/c.2", "files/b/c.3"}


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_any_change_of_a_snapshot_is_damage(data):
    content = bytearray(SNAPSHOT.encode())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 2))]
    else:
        position = data.draw(st.integers(0, len(content) - 2))
        if chr(content[position]).isspace():
            return
        content[position] ^= data.draw(st.integers(1, 127))
        if chr(content[position]).isspace():
            return
    with pytest.raises(DamagedMirrorError):
        decode(bytes(content))


NOT_RECORDS = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[]",
    b"1e999",
    b"\xff",
    b"",
    b'{"run": "too large"}' + b" " * 600_000,
]


@pytest.mark.parametrize("content", NOT_RECORDS)
def test_objects_that_are_not_records_are_refused_without_a_crash(local, tmp_path, local_copies, monkeypatch, content):
    monkeypatch.setattr(store_module, "MAX_OBJECT_BYTES", 550_000)
    for name in ("lease.json", "run.json", "latest.json", "checkpoints/step_00000001/published.json"):
        local.write(name, content)
    with pytest.raises(DamagedMirrorError):
        read_snapshot(local, "latest.json", "r")
    assert list(read_published(local, "r")[1]) == [1]
    with pytest.raises(NoRunError, match="damaged"):
        fetch_run(local.url, "last")
    assert list(fetch_small_files(local, [{"a": (Part("run.json", len(content), "1"),)}], tmp_path)) == ["a"]
    Lease(local).take()


def test_snapshot_with_an_infinite_number_is_damaged():
    values = json.loads(SNAPSHOT.encode())
    values["number"] = math.inf
    values.pop("checksum")
    with pytest.raises(DamagedMirrorError):
        decode(json.dumps({"checksum": checksum_of(values), **values}).encode())


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/../b", "", "a//b", "a\\b"])
@pytest.mark.parametrize("place", ["checkpoint", "files", "object"])
def test_name_that_leads_out_of_the_folder_is_damage(name, place):
    part = Part(name if place == "object" else "a", 1, "1")
    values = {"checkpoint": {"checkpoint": {name: part}}, "files": {"files": {name: (part,)}}}
    snapshot = Snapshot(run="r", **values.get(place, {"files": {"a": (part,)}}))
    with pytest.raises(DamagedMirrorError):
        decode(snapshot.encode())


def test_snapshot_at_the_place_of_another_step_or_run_is_damaged(store):
    store.write("checkpoints/step_00000003/published.json", SNAPSHOT.encode())
    store.write("checkpoints/step_00000004/published.json", SNAPSHOT.encode())
    store.write("checkpoints/step_00000005/shard", b"1")
    assert list_published(store) == [4, 3]
    snapshots, damaged = read_published(store, "r")
    assert (list(snapshots), list(damaged)) == ([3], [4])
    with pytest.raises(DamagedMirrorError, match="another run"):
        read_snapshot(store, "checkpoints/step_00000003/published.json", "other")


def test_checkpoint_without_a_manifest_is_damaged(local):
    bare = Snapshot(run="r", step=3, checkpoint={"a": SNAPSHOT.checkpoint["a"]})
    local.write("checkpoints/step_00000003/published.json", bare.encode())
    snapshots, damaged = read_published(local, "r")
    assert (list(snapshots), list(damaged)) == ([], [3])


def test_second_lease_is_refused_while_the_first_sends_heartbeats(store, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    first, second = Lease(store), Lease(store)
    first.take()
    first.keep()
    with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} on "):
        second.take()
    first.release()
    second.take()
    assert second.check()
    second.release()
    assert store.names("") == []


def test_lease_of_a_silent_process_is_taken_after_its_expiry(store, monkeypatch):
    monkeypatch.setattr(lease_module, "EXPIRY_SECONDS", 0.3)
    lost, new = Lease(store), Lease(store)
    lost.take()
    content = json.loads(store.read(LEASE))
    store.write(LEASE, json.dumps({**content, "machine": "another"}).encode())
    new.take()
    assert (new.check(), lost.check(), lost.is_lost) == (True, False, True)
    lost.release()
    assert new.check()


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"time": 0.0}, {"token": "of an earlier process with our id"}])
def test_lease_of_a_process_that_is_gone_is_taken_at_once(local, monkeypatch, change):
    monkeypatch.setattr(lease_module, "EXPIRY_SECONDS", 10**6)
    Lease(local).take()
    local.write(LEASE, json.dumps({**json.loads(local.read(LEASE)), **change}).encode())
    Lease(local).take()


def test_small_files_grow_by_their_ends_and_are_restored(store, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    (run / "plots").mkdir(parents=True)
    again.mkdir()
    copier, files, rng = Copier(store), {}, random.Random(0)
    (run / "fixed").write_bytes(b"")
    for _ in range(5):
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(rng.randbytes(rng.randrange(1, 400)))
        (run / "plots" / "status").write_bytes(rng.randbytes(50))
        files = copier.copy_small_files(run, files)
    assert copier.bytes == (run / "metrics.jsonl").stat().st_size + 5 * 50
    assert len(files["metrics.jsonl"]) == 5
    with (run / "metrics.jsonl").open("r+b") as file:
        file.truncate(files["metrics.jsonl"][0].bytes + 1)
    files = copier.copy_small_files(run, files)
    assert len(files["metrics.jsonl"]) == 2
    assert fetch_small_files(store, [files], again) == {}
    assert {name: (again / name).read_bytes() for name in small_files(again)} == {
        name: (run / name).read_bytes() for name in small_files(run)
    }


def test_files_that_are_not_of_the_run_are_not_copied(tmp_path):
    run = tmp_path / "run"
    for name in ("checkpoints/latest", "cache/tokens", ".lock", ".a.1.partial", "config.yaml", ".hydra/hydra.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    (run / "link").symlink_to("config.yaml")
    assert set(small_files(run, [(run / "cache").resolve()])) == {"config.yaml", ".hydra/hydra.yaml"}


def test_file_whose_name_no_store_can_hold_is_skipped_with_one_warning(store, tmp_path, caplog):
    names = ["a\\b", "x" * 230, "line\nbreak", os.fsdecode(b"latin-\xe9")]
    for name in (*names, "good"):
        (tmp_path / name).write_text("content")
    copier = Copier(store)
    for _ in range(2):
        files = copier.copy_small_files(tmp_path, {})
    assert list(files) == ["good"]
    assert len([record for record in caplog.records if "is not copied to" in record.message]) == len(names)
    assert decode(Snapshot(run="r", files=files).encode()).files == files


def test_restored_files_do_not_replace_what_is_not_theirs(local, tmp_path):
    run, link, parts = tmp_path / "run", tmp_path / "elsewhere", {}
    for path in (run, link, run / "folder"):
        path.mkdir()
    (run / "link").symlink_to(link)
    (run / ".lock").write_text("host")
    local.write("files/x", b"x")
    part = Part("files/x", 1, xxhash.xxh3_128_hexdigest(b"x"))
    names = (".lock", "checkpoints/step_00000001/manifest.json", "mirror.json", "a.partial/b")  # never small files
    occupied = ("file/below", "folder", "link/a", "\ud800", "n" * 300)
    parts = dict.fromkeys((*names, *occupied, "file", "good"), (part,))
    reasons = fetch_small_files(local, [parts], run)
    assert sorted(reasons) == sorted(occupied)
    assert {path.relative_to(run).as_posix() for path in run.rglob("*")} == {".lock", "file", "folder", "good", "link"}
    assert (run / ".lock").read_text() == "host"
    assert list(link.iterdir()) == []


def test_log_is_restored_once_even_if_that_was_interrupted(local, tmp_path):
    files = {"foundry.log": (Part("files/log", 8, xxhash.xxh3_128_hexdigest(b"1 a\n2 b\n")),)}
    local.write("files/log", b"1 a\n2 b\n")
    (tmp_path / "foundry.log").write_text("3 c\n")
    for _ in range(2):
        fetch_small_files(local, [files], tmp_path, is_launch=True)
        assert (tmp_path / "foundry.log").read_text() == "1 a\n2 b\n3 c\n"


def put_run(store, folder, run, number=1, checkpoint=None):
    """Write a run with the small files of a folder, and perhaps with a checkpoint of step 1, to a store."""
    folder.mkdir(exist_ok=True)
    store.write("run.json", json.dumps({"run": run}).encode())
    snapshot = Snapshot(run=run, step=None, files=Copier(store).copy_small_files(folder, {}), number=number)
    if checkpoint is not None:
        (folder / "manifest").write_bytes(checkpoint)
        digest = xxhash.xxh3_128_hexdigest(checkpoint)
        part = Copier(store).copy_checkpoint_file(folder / "manifest", 1, len(checkpoint), digest)
        snapshot = replace(snapshot, step=1, checkpoint={"manifest.json": part})
        store.write("checkpoints/step_00000001/published.json", snapshot.encode())
    store.write("latest.json", replace(snapshot, checkpoint={}).encode())


@pytest.fixture
def local_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("FOUNDRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_local_copy_never_mixes_two_runs_that_were_at_one_url(local, tmp_path, local_copies):
    for run, content, name in (("1", b"old", "result.json"), ("2", b"new", "status.json")):
        (tmp_path / run).mkdir()
        (tmp_path / run / name).write_bytes(content)
        put_run(local, tmp_path / run, run, checkpoint=content)
        folder = fetch_run(local.url, "last")
    assert (folder / "checkpoints" / "latest" / "manifest.json").read_bytes() == b"new"
    assert not (folder / "result.json").exists()
    (tmp_path / "2" / "status.json").write_bytes(b"newer")
    put_run(local, tmp_path / "2", "2", checkpoint=b"saved again")  # the same run and step
    fetch_run(local.url, "last")
    assert (folder / "checkpoints" / "latest" / "manifest.json").read_bytes() == b"saved again"
    assert (folder / "status.json").read_bytes() == b"newer"
    local.write("latest.json", b"damaged")
    shutil.rmtree(local_copies)
    fetch_run(local.url, "last")
    assert (folder / "status.json").read_bytes() == b"newer"


def test_file_that_the_run_deletes_while_it_is_read_is_read_in_its_new_form(local, tmp_path, local_copies, monkeypatch):
    status, read = tmp_path / "run" / "status.json", Store.read
    status.parent.mkdir()
    status.write_text("old")
    put_run(local, status.parent, "r")

    def read_late(self, name):
        if name.startswith("files/status.json") and status.read_text() == "old":
            status.write_text("new")
            put_run(local, status.parent, "r", number=2)
            local.remove(name)
        return read(self, name)

    monkeypatch.setattr(Store, "read", read_late)
    assert (fetch_run(local.url, None) / "status.json").read_text() == "new"


def test_report_reads_the_runs_of_a_store_with_any_names(local, tmp_path, local_copies, monkeypatch, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text("content")
    for name in ("sweep", "sweep/0", "sweep/1"):
        put_run(Store(f"{local.url}/{name}"), tmp_path / "run", "r")
    local.remove("sweep/run.json")
    local.write("run.json", b"{}")  # so that `..` looks like a job
    local.write("sweep/1/latest.json", b"damaged")
    monkeypatch.setattr(Store, "names", lambda self, folder: ["..", ".lock", "0", "1"])
    folder = fetch_runs(f"{local.url}/sweep")
    assert (folder / "0" / "status.json").read_text() == "content"
    assert "/sweep/1 is damaged: latest.json is incomplete" in caplog.text
    assert [path.name for path in (local_copies / "mirrors").iterdir()] == [folder.name]
    monkeypatch.setattr(Store, "names", lambda self, folder: ["1"])
    assert {path.name for path in fetch_runs(f"{local.url}/sweep").iterdir()} == {".lock", "1"}


def damaged(store, part, how):
    content = store.read(part.object)
    if how == "missing":
        store.remove(part.object)
    else:
        store.write(part.object, content[:-1] if how == "truncated" else b"?" + content[1:])


@pytest.mark.parametrize("how", some_of(["missing", "truncated", "changed"], "changed"))
def test_damaged_objects_are_not_restored(store, tmp_path, how):
    run, again = tmp_path / "run", tmp_path / "again"
    run.mkdir()
    again.mkdir()
    (run / "a").write_bytes(b"content of a file")
    copier = Copier(store)
    old = copier.copy_small_files(run, {})
    (run / "a").write_bytes(b"content of a file, longer")
    new = copier.copy_small_files(run, old)
    damaged(store, new["a"][1], how)
    assert fetch_small_files(store, [new, old], again) == {}
    assert (again / "a").read_bytes() == b"content of a file"
    damaged(store, old["a"][0], how)
    (again / "a").write_bytes(b"own")
    assert list(fetch_small_files(store, [new, old], again)) == ["a"]
    assert (again / "a").read_bytes() == b"own"
    with pytest.raises(DamagedMirrorError):
        fetch_file(store, old["a"][0], tmp_path / "x")
    with pytest.raises(DamagedMirrorError):
        fetch_checkpoint(store, Snapshot(run="r", step=1, checkpoint={"a": old["a"][0]}), again)
    assert list((again / "checkpoints").iterdir()) == []


def test_file_of_a_checkpoint_is_copied_once_and_only_if_intact(store, tmp_path):
    file = tmp_path / "shard"
    file.write_bytes(b"weights")
    checksum = xxhash.xxh3_128_hexdigest(b"weights")
    copier = Copier(store)
    for _ in range(2):
        part = copier.copy_checkpoint_file(file, 3, 7, checksum)
        assert copier.bytes == 7
    assert store.read(part.object) == b"weights"
    file.write_bytes(b"Weights")
    with pytest.raises(OSError, match="differs from its checksum"):
        copier.copy_checkpoint_file(file, 4, 7, checksum)
    assert store.sizes("checkpoints/step_00000004") == {}
