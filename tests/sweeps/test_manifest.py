"""sweep.json: job numbers stay, and changed jobs are refused."""

import json
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.record.frozen import hash_config
from foundry.config.schemas.root import to_config
from foundry.config.schemas.sweeper import Sweep
from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.launch.launchers import queue_job
from foundry.run_dir.status import read_status, write_status
from foundry.sweeps.grid import expand
from foundry.sweeps.manifest import SweepManifest

LOSS = {"metric": "val_loss", "direction": "minimize"}
FIELDS = {"state", "reason", "step", "config_hash", "started", "updated", "version"}


def points(*words):
    return expand(OverridesParser.create().parse_overrides(list(words)), Sweep())


@pytest.fixture
def config_of():
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        yield lambda job, *words: to_config(compose(CONFIG_NAME, [*job.overrides, *words]))


def placed(index, job, config):
    """Return the job with index, directory and hash, as a sweeper adds them."""
    return replace(job, index=index, dir=str(index), config_hash=hash_config(config))


def as_read(job):
    """Return the job as read from sweep.json, without the shared overrides."""
    return replace(job, overrides=())


def begin_sweep(folder, config_of, jobs):
    manifest = SweepManifest.begin(folder, ["-m", "some=words"], launcher="sequential", **LOSS)
    entries = [placed(k, job, config_of(job)) for k, job in enumerate(jobs)]
    for entry, job in zip(entries, jobs, strict=True):
        queue_job(folder / entry.dir, config_of(job))
    manifest = manifest.with_jobs(entries)
    manifest.save(folder)
    return manifest


def test_manifest_round_trips_through_sweep_json(tmp_path, config_of):
    manifest = begin_sweep(tmp_path, config_of, points("hparams.lr=1e-3,2e-3"))
    assert SweepManifest.load(tmp_path) == replace(manifest, jobs=tuple(map(as_read, manifest.jobs)))
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert set(content) == {"command", "created", "launcher", "jobs", "metric", "direction"}
    assert (content["metric"], content["direction"]) == ("val_loss", "minimize")
    assert set(content["jobs"][1]) == {"index", "dir", "overrides", "config_hash", "id"}
    assert (content["jobs"][1]["index"], content["jobs"][1]["overrides"]) == (1, ["hparams.lr=0.002"])
    assert SweepManifest.load(tmp_path / "nowhere") is None


def test_known_jobs_keep_their_numbers_and_new_jobs_get_the_next(tmp_path, config_of):
    begin_sweep(tmp_path, config_of, points("hparams.lr=1e-3,2e-3"))
    again = SweepManifest.begin(tmp_path, ["-m", "other=words"], launcher="local", **LOSS)
    assert again.number(points("hparams.lr=5e-4,2e-3,1e-3,4e-3")) == [2, 1, 0, 3]
    assert (again.command, again.launcher) == (("-m", "other=words"), "local")
    assert again.created == SweepManifest.load(tmp_path).created


def test_jobs_of_an_earlier_start_stay_in_the_sweep(tmp_path, config_of):
    manifest = begin_sweep(tmp_path, config_of, points("hparams.lr=1e-3,2e-3"))
    (job,) = points("hparams.lr=4e-3")
    more = manifest.with_jobs([placed(2, job, config_of(job))])
    assert [entry.index for entry in more.jobs] == [0, 1, 2]


def test_manifest_refuses_jobs_with_changed_settings(tmp_path, config_of):
    jobs = points("hparams.lr=1e-3,2e-3")
    manifest = begin_sweep(tmp_path, config_of, jobs)
    configs = [config_of(job) for job in jobs]
    entries = [placed(k, job, config) for k, (job, config) in enumerate(zip(jobs, configs, strict=True))]
    manifest.check(tmp_path, entries, configs)
    changed = [config_of(job, "hparams.max_steps=7", "optimizer.weight_decay=0.5") for job in jobs]
    entries = [placed(k, job, config) for k, (job, config) in enumerate(zip(jobs, changed, strict=True))]
    with pytest.raises(ConfigError) as refused:
        manifest.check(tmp_path, entries, changed)
    lines = str(refused.value).splitlines()
    assert len(lines) == 2
    assert "hparams.max_steps: 500 -> 7 in job 0 (hparams.lr=0.001), job 1 (hparams.lr=0.002); restore" in lines[0]
    assert "optimizer.weight_decay: " in lines[1]


def test_manifest_refuses_a_directory_with_another_run(tmp_path, config_of):
    (job,) = points("hparams.lr=1e-3")
    config = config_of(job)
    entry = placed(0, job, config)
    (tmp_path / "0").mkdir()
    write_status(tmp_path / "0", state="finished", config_hash="of another run")
    manifest = SweepManifest.begin(tmp_path, [], launcher="sequential", **LOSS)
    with pytest.raises(ConfigError, match=r"contains another run in 0, the directory of job 0, or choose"):
        manifest.check(tmp_path, [entry], [config])
    write_status(tmp_path / "0", config_hash=entry.config_hash)
    manifest.check(tmp_path, [entry], [config])


def test_queued_job_has_status_and_config(tmp_path, config_of):
    (job,) = points("hparams.lr=1e-3")
    config = config_of(job)
    queue_job(tmp_path / "0", config)
    status = read_status(tmp_path / "0")
    assert set(status) == FIELDS
    assert (status["state"], status["step"], status["started"]) == ("queued", 0, None)
    assert status["config_hash"] == hash_config(config)
    assert "lr: 0.001" in (tmp_path / "0" / "config.yaml").read_text()


@pytest.mark.parametrize(("state", "kept"), [("finished", "finished"), ("stopped", "queued"), ("failed", "queued")])
def test_queue_job_keeps_a_finished_job_of_the_same_config(tmp_path, config_of, state, kept):
    job, other = points("hparams.lr=1e-3,2e-3")
    queue_job(tmp_path, config_of(job))
    write_status(tmp_path, state=state)
    queue_job(tmp_path, config_of(job))
    assert read_status(tmp_path)["state"] == kept
    queue_job(tmp_path, config_of(other))
    assert read_status(tmp_path)["state"] == "queued"


def test_requeued_job_keeps_step_and_start_time(tmp_path, config_of):
    (job,) = points("hparams.lr=1e-3")
    queue_job(tmp_path, config_of(job))
    write_status(tmp_path, state="stopped", reason="SIGINT", step=12, started="then")
    queue_job(tmp_path, config_of(job))
    status = read_status(tmp_path)
    assert (status["state"], status["reason"], status["step"], status["started"]) == ("queued", "", 12, "then")


def test_format_reason_is_the_type_and_first_line_of_the_error():
    assert format_reason(ValueError("first\nlast")) == "ValueError: first"
    assert format_reason(ValueError()) == "ValueError"
    assert format_reason(ConfigError([Violation("a", "is 1"), Violation("b", "is 2")])) == "a: is 1; b: is 2"
