"""Runs with `checkpoint.mirror` resume on an empty machine, bit for bit, and refuse the mirrors of other runs."""

import errno
import json
import re
import shutil
import signal
import time

import pytest
from support.examples import some_of
from support.object_store import BUCKET, CREDENTIALS, environment, s3_server

from foundry.checkpoint.folder import read_manifest
from foundry.run_dir.checkpoints import find, list_checkpoints
from foundry.run_dir.mirror.snapshot import list_published, step_of
from foundry.run_dir.mirror.store import Store
from foundry.run_dir.strict_json import read_object
from foundry.tracking.metrics_file import read_metrics

TIMINGS = {"step_seconds", "samples_per_second", "tokens_per_second", "tflops", "mfu", "peak_memory_bytes"}
RUN = [
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
    "tracking.progress=false",
    "tracking.plots=false",
    "evaluation.interval=0.25 run",
    "evaluation.max_samples=8",
    "evaluation.write_samples=false",
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=2",
    "precision=fp32",
    "checkpoint.every_minutes=null",
]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(400)))


def words(url, *more, steps=12, interval=3, run_dir="run"):
    lengths = [f"hparams.max_steps={steps}", f"checkpoint.interval={interval}", f"hydra.run.dir={run_dir}"]
    return [*RUN, *lengths, *([] if url is None else [f"checkpoint.mirror={url}"]), *more]


def outcome(run_dir):
    """Return the values of a run that a restart must not change."""
    records = [{k: v for k, v in record.items() if k not in TIMINGS} for record in read_metrics(run_dir)]
    manifest = read_manifest(find(run_dir, "last"))
    files = {name: facts for name, facts in manifest.files.items() if name != "rank-00000.json"}
    return records, files, manifest.state, read_object(run_dir / "result.json")["loss"]


def kill_after(process, run_dir, step):
    """Kill a run with SIGKILL once the store has its checkpoint of a step, or a later one."""
    deadline = time.monotonic() + 200
    while True:
        log = run_dir / "foundry.log"
        copied = [int(n) for n in re.findall(r"copied step (\d+) ", log.read_text())] if log.is_file() else []
        if copied and copied[-1] >= step:
            break
        assert process.poll() is None, process.outputs()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def corrupt(folder, pattern):
    """Change the last byte of the file in a folder that matches a pattern."""
    (path,) = folder.glob(pattern)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_run_continues_from_a_store_after_its_directory_was_deleted(tmp_path, text, run_command):
    url = f"memory://{tmp_path.name}"
    run_command(*words(None, run_dir="reference"))
    reference = outcome(tmp_path / "reference")
    for limit in ("1e-9", "null"):
        run_command(*words(url, f"hparams.max_minutes={limit}"))
        log = (tmp_path / "run" / "foundry.log").read_text()
        if limit != "null":
            first = read_metrics(tmp_path / "run")
            shutil.rmtree(tmp_path / "run")
    records, *rest = outcome(tmp_path / "run")
    assert f"restored step 1 of the run from {url}" in log
    assert [record for record in records if record["step"] > 1] == reference[0][1:]
    assert records[0] == {name: value for name, value in first[0].items() if name not in TIMINGS}
    assert rest[0] == reference[1]
    shutil.rmtree(tmp_path / "run")
    _, err = run_command(*words(url, "hparams.max_minutes=null"))
    assert "holds a finished run" in err
    assert outcome(tmp_path / "run") == (records, *rest)
    assert (tmp_path / "run" / "foundry.log").read_text().startswith(log)


@pytest.mark.long
def test_killed_run_on_s3_ends_bit_identical_and_nothing_contains_the_credentials(tmp_path, text, shell):
    lengths = {"steps": 200, "interval": 20}  # the run is killed long before its end
    shell.run(*words(None, run_dir="reference", **lengths))
    with s3_server() as server:
        variables = environment(server.port)
        command = words(f"s3://{BUCKET}/run", **lengths)
        process = shell.start(*command, variables=variables)
        kill_after(process, tmp_path / "run", 20)
        assert not (tmp_path / "run" / "result.json").exists()
        shutil.rmtree(tmp_path / "run")
        out, err = shell.run(*command, variables=variables)
        for own, expected in zip(outcome(tmp_path / "run"), outcome(tmp_path / "reference"), strict=True):
            assert own == expected
        store = Store(f"s3://{BUCKET}/run")
        best = step_of(find(tmp_path / "run", "best").name)
        assert list_published(store) == sorted({200, 180, best}, reverse=True)
        assert "lease.json" not in store.names("")
        uploads = [path for method, path, size in server.uploads if "/shard-" in path]
        assert len(uploads) == len(set(uploads))
        contents = [store.read(name) for name in store.sizes("")]
        contents += [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
        contents += [out.encode(), err.encode()]
        for secret in CREDENTIALS.values():
            assert not any(secret.encode() in content for content in contents)


def test_run_waits_no_longer_for_the_store_than_its_setting(tmp_path, text, run_command):
    url = f"memory://{tmp_path.name}"
    _, err = run_command(*words(url, "checkpoint.mirror_seconds=0", steps=4, interval=2))
    assert "is incomplete after 0 s (checkpoint.mirror_seconds)" in err
    assert "another process" not in err
    _, err = run_command(*words(url, "checkpoint.mirror_seconds=60", steps=4, interval=2))
    assert "holds a finished run" in err
    assert list_published(Store(url))[0] == 4  # the second start completes the copy
    assert any(name.startswith("result.json.") for name in Store(url).sizes("files"))


@pytest.mark.long
def test_interrupted_restoring_is_completed_by_the_next_start(tmp_path, text, run_command, monkeypatch):
    def interrupt(store, choices, run_dir, **options):
        raise KeyboardInterrupt

    command = words(f"file://{tmp_path}/store", steps=4, interval=2)
    run_command(*command)
    before, log = outcome(tmp_path / "run"), (tmp_path / "run" / "foundry.log").read_text()
    shutil.rmtree(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("foundry.engine.mirror_files.fetch_small_files", interrupt)
        run_command(*command, code=130)
    assert list_checkpoints(tmp_path / "run")
    run_command(*command)
    assert outcome(tmp_path / "run") == before
    assert (tmp_path / "run" / "foundry.log").read_text().startswith(log)


def test_store_of_a_later_version_is_refused_and_stays(tmp_path, text, run_command, monkeypatch):
    command = words(f"file://{tmp_path}/store", steps=4, interval=2)
    run_command(*command)
    shutil.rmtree(tmp_path / "run")
    before = Store(f"file://{tmp_path}/store").sizes("")
    monkeypatch.setattr("foundry.run_dir.mirror.snapshot.FORMAT", 0)
    _, err = run_command(*command, code=2)
    assert "has format 1; use a later version of foundry, or choose another URL" in err
    _, err = run_command(f"run=file://{tmp_path}/store", "out=x", module="foundry.export", code=2)
    assert "has format 1; use a later version of foundry" in err
    assert Store(f"file://{tmp_path}/store").sizes("") == before


def test_full_disk_while_restoring_is_one_line(tmp_path, text, run_command, monkeypatch):
    def fail(store, choices, run_dir, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(run_dir / "metrics.jsonl"))

    command = words(f"file://{tmp_path}/store", steps=4, interval=2)
    run_command(*command)
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr("foundry.engine.mirror_files.fetch_small_files", fail)
    _, err = run_command(*command, code=2)
    assert "hydra.run.dir: cannot be restored from file://" in err
    assert "No space left on device" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("is_latest_damaged", some_of([False, True], True))
def test_damaged_checkpoint_in_the_store_is_not_used_and_replaced(tmp_path, text, run_command, is_latest_damaged):
    command = words(f"file://{tmp_path}/store", "checkpoint.keep_last=3")
    run_command(*command)
    before, checkpoints = outcome(tmp_path / "run"), tmp_path / "store" / "checkpoints"
    shutil.rmtree(tmp_path / "run")
    corrupt(checkpoints / "step_00000012", "shard-*")
    (checkpoints / "step_00000009" / "published.json").write_bytes(
        (checkpoints / "step_00000006" / "published.json").read_bytes()
    )
    if is_latest_damaged:  # otherwise it records the result of the damaged step
        (tmp_path / "store" / "latest.json").write_bytes(b"{")
    _, err = run_command(*command)
    assert "step 12 in file://" in err
    assert "shard-00000.safetensors" in err
    assert "restored step 6 of the run" in err
    assert outcome(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run")
    assert "restored step 12 of the run" in run_command(*command)[1]


@pytest.mark.long
def test_run_does_not_start_if_all_checkpoints_in_the_store_are_damaged(tmp_path, text, run_command):
    command = words(f"file://{tmp_path}/store", "checkpoint.keep_last=1")
    run_command(*command)
    shutil.rmtree(tmp_path / "run")
    corrupt(tmp_path / "store" / "checkpoints" / "step_00000012", "tensors.json.*")
    _, err = run_command(*command, code=2)
    assert "checkpoint.mirror: is file://" in err
    assert "all of its checkpoints are damaged" in err
    assert not list_checkpoints(tmp_path / "run")


@pytest.mark.long
def test_checkpoint_that_cannot_be_read_is_not_replaced_from_the_store(tmp_path, text, run_command):
    command = words(f"file://{tmp_path}/store")
    run_command(*command)
    manifest = find(tmp_path / "run", "last") / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(later := json.dumps(content | {"format": 999}))
    _, err = run_command(*command, code=2)
    assert "hydra.run.dir: is " in err
    assert "its step_00000012 cannot be read" in err
    assert manifest.read_text() == later


def test_store_of_another_run_is_refused_before_anything_starts(tmp_path, text, run_command):
    url = f"file://{tmp_path}/store"
    run_command(*words(url))
    for more, expected in (
        (["hydra.run.dir=other", "hparams.seed=1"], ["hparams.seed: is 1 but the checkpoint was trained with", url]),
        (["hydra.run.dir=other", "checkpoint.resume=never"], ["checkpoint.resume: is never but", url]),
    ):
        _, err = run_command(*words(url, *more), code=2)
        assert all(part in err for part in expected), err
        assert not (tmp_path / "other").exists()
    run_command(*words(None, run_dir="other"))
    _, err = run_command(*words(url, run_dir="other"), code=2)
    assert f"checkpoint.mirror: is {url}, which holds another run than {tmp_path / 'other'}" in err
    assert [path.name for path in (tmp_path / "store").iterdir() if path.name == "lease.json"] == []


def test_store_that_cannot_be_used_is_refused_with_a_remedy(tmp_path, text, run_command):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "blocked").write_text("x")
    for url, expected in (
        (f"file://{tmp_path}/mine", "which has files that are not a run's, such as thesis.txt; choose another URL"),
        (f"file://{tmp_path}/blocked/run", "which cannot be used: "),
        ("s4://bucket/run", "which this machine cannot use: Protocol not known: s4"),
        ("s3://me:hunter2hunter2@bucket/run", "has a user name or password; leave them out"),
        ("s3://bucket/run?secret=hunter2hunter2", "has a query"),
        ("runs/copy", "is not a URL"),
    ):
        out, err = run_command(*words(f"'{url}'"), code=2)
        assert err.startswith("checkpoint.mirror: "), err
        assert expected in err, err
        assert err.count("\n") <= 2  # the check of secrets adds a line
        assert "hunter2" not in out + err
        assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    _, err = run_command(*words(f"file://{tmp_path}/store", "checkpoint=none", interval="null"), code=2)
    assert "checkpoint.mirror: has no effect with checkpoint=none" in err


@pytest.mark.long
def test_second_process_on_the_same_store_is_refused(tmp_path, text, shell):
    url = f"file://{tmp_path}/store"
    process = shell.start(*words(url, steps=100_000, interval=1000))
    try:
        shell.wait_for_steps(process, tmp_path / "run", 3)
        _, err = shell.run(*words(url, run_dir="second", steps=100_000, interval=1000), code=2)
        assert f"checkpoint.mirror: is {url}, but process {process.pid} on " in err
        assert not (tmp_path / "second").exists()
        process.send_signal(signal.SIGTERM)
        shell.finish(process, code=143)
    finally:
        process.kill()
    steps = list_published(Store(url))
    assert read_object(tmp_path / "run" / "status.json")["state"] == "stopped"
    assert len(steps) >= 1
    shutil.rmtree(tmp_path / "run")
    _, err = shell.run(*words(url, "hparams.max_minutes=1e-9", steps=100_000, interval=1000))
    assert f"restored step {steps[0]} of the run" in err


@pytest.mark.long
def test_jobs_of_a_sweep_use_folders_of_the_url(tmp_path, text, run_command):
    url = f"file://{tmp_path}/store"
    command = [*words(url, steps=4, interval=2)[:-2], f"checkpoint.mirror={url}", "hydra.sweep.dir=sweep"]
    command += ["-m", "hparams.lr=0.1,0.2"]
    run_command(*command)
    before = [outcome(tmp_path / "sweep" / job) for job in "01"]
    assert sorted(Store(url).names("")) == ["0", "1"]
    shutil.rmtree(tmp_path / "sweep")
    run_command(*command)
    assert [outcome(tmp_path / "sweep" / job) for job in "01"] == before


def test_commands_read_a_run_from_its_url(tmp_path, text, run_command):
    url, run = f"file://{tmp_path}/store", tmp_path / "run"
    run_command(*words(f"{url}/one"))
    for name, source in (("local", run), ("remote", f"{url}/one")):
        run_command(f"run={source}", f"out={name}", "which=12", module="foundry.export")
        run_command(f"run={source}", f"out={name}.json", "max_samples=4", module="foundry.eval")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "remote" / name).read_bytes()
    results = [read_object(tmp_path / f"{name}.json") for name in ("local", "remote")]
    assert results[0]["loss"] == results[1]["loss"]
    local, _ = run_command(f"run={run}", "out=a", "max_new_tokens=4", module="foundry.sample")
    remote, _ = run_command(f"run={url}/one", "out=b", "max_new_tokens=4", module="foundry.sample")
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "b.txt").read_text()
    assert local.replace("a.txt", "b.txt") == remote
    out, _ = run_command(f"dir={url}", module="foundry.report")
    assert "finished" in out
    out, _ = run_command(f"run={url}/one", f"against={run}", module="foundry.diff")
    assert "12" in out
    for command, option, *expected in (
        ("sample", f"run={url}/one", "out: has no value, and run=file:///", " is only read; give it as out="),
        ("sample", f"run={url}/none", "run: is file:///", "/none, which has no run; give the URL of a run"),
        ("export", f"run={url}", "run: is file:///", "/store, which has no run"),
        ("report", f"dir={url}/none", "dir: is file:///", "/none, which has no run"),
        ("report", "dir=s3://me:word@bucket/a", "has a user name or password"),
    ):
        more = [] if command == "report" or expected[0].startswith("out") else ["out=c"]
        _, err = run_command(option, *more, module=f"foundry.{command}", code=2)
        assert all(part in err for part in expected), err
    _, err = run_command(f"run={url}/one", "which=7", "out=c", module="foundry.export", code=2)
    assert "which has no checkpoint '7'; steps with a checkpoint: 9, 12" in err
    assert {path.name for path in (tmp_path / "store" / "one").iterdir()} == {
        "checkpoints",
        "files",
        "latest.json",
        "run.json",
    }


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_copy_their_shards_and_restore_them(tmp_path, text, shell):
    ranks = ["distributed=fsdp", "distributed.nproc_per_node=2"]
    url = f"file://{tmp_path}/store"
    shell.run(*words(None, *ranks, run_dir="reference"))
    shell.run(*words(url, "hparams.max_minutes=1e-9", *ranks))
    first = read_metrics(tmp_path / "run")[0]
    assert len(Store(url).sizes("checkpoints/step_00000002")) == 7
    shutil.rmtree(tmp_path / "run")
    _, err = shell.run(*words(url, *ranks))
    assert "restored step 2 of the run" in err
    records, files, *_ = outcome(tmp_path / "run")
    reference = outcome(tmp_path / "reference")
    assert [record for record in records if record["step"] > 2] == reference[0][2:]
    assert records[0]["loss"] == first["loss"]
    assert files == reference[1]
    assert list_published(Store(url)) == [12, 9]
