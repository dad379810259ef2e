"""Settings of a study's place that are refused, in one line and without a password."""

import errno
import os

import pytest

from foundry.config.schemas.evaluation import Direction
from foundry.config.schemas.sweeper import Search, Wait
from foundry.core.errors import ConfigError
from foundry.run_dir.redact import remember
from foundry.run_dir.study_storage import VARIABLE, open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra search")
from optuna.storages._rdb import models  # noqa: E402
from sqlalchemy.exc import ProgrammingError  # noqa: E402

from foundry.sweeps.search.place import StudyPlace  # noqa: E402 - which imports it

FACTS = {"lr": "0 to 1", "direction": "minimize", "overrides": "model=dit"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def place(sweep_dir, storage=None, **options):
    return StudyPlace(Search(metric="val_loss", direction=Direction.minimize, storage=storage, **options), sweep_dir)


def create(sweep_dir, storage=None, **options):
    sweep_dir.mkdir(exist_ok=True)
    with place(sweep_dir, storage, **options).open(FACTS) as study:
        study.add_trial()


def check(sweep_dir, storage=None, facts=FACTS, **options):
    there = place(sweep_dir, storage, **options)
    there.check(there.find(), facts)
    return there


def refusal(sweep_dir, storage=None, *, facts=FACTS, **options):
    with pytest.raises(ConfigError) as refused:
        check(sweep_dir, storage, facts, **options)
    (violation,) = refused.value.violations
    assert "\n" not in str(violation)
    return str(violation)


@pytest.mark.parametrize("storage", ["study.jsonl", "sqlite:///study.db"])
def test_study_in_a_relative_path_is_the_same_from_another_folder(storage, folder, monkeypatch):
    create(folder / "a", storage)
    (folder / "elsewhere").mkdir()
    there = place(folder / "b", storage)
    monkeypatch.chdir(folder / "elsewhere")
    study = there.find()
    assert study.is_shared
    assert len(study.trials()) == 1
    assert list((folder / "elsewhere").iterdir()) == []


def test_nothing_is_written_before_the_search_begins(folder):
    there = place(folder / "a", str(folder / "study.jsonl"))
    assert there.is_new
    assert there.find() is None
    assert list(folder.iterdir()) == []


def test_jobs_receive_the_location_in_the_environment_only(folder, monkeypatch):
    url = f"sqlite:///{folder}/study.db?token=correct-horse-battery"
    remember(url, "${oc.env:STUDY}")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("foundry.sweeps.search.place.open_storage", lambda location: open_storage(url.split("?")[0]))
    (folder / "a").mkdir()
    with place(folder / "a", url).open(FACTS):
        assert os.environ[VARIABLE] == url
    assert VARIABLE not in os.environ
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(b"correct-horse" in text for text in texts)
    assert b"${oc.env:STUDY}" in (folder / "a" / "study.json").read_bytes()


def test_another_search_in_a_shared_study_is_refused(folder):
    create(folder / "a", "study.jsonl")
    line = refusal(folder / "b", "study.jsonl", facts={**FACTS, "lr": "0 to 2", "overrides": "model=unet"})
    contains = "the study there contains a search with lr 0 to 1, overrides model=dit"
    assert line == f"hydra.sweeper.study_name: is search, but {contains}; use these settings, or another name"
    assert place(folder / "b", "study.jsonl", study_name="other").find() is None


def test_storage_of_a_sweep_directory_must_not_change(folder):
    create(folder / "private")
    create(folder / "shared", "study.jsonl")
    assert "has its own study in optuna.jsonl; omit it" in refusal(folder / "private", "study.jsonl")
    for options in ({}, {"storage": "other.jsonl"}, {"storage": "study.jsonl", "study_name": "other"}):
        assert "began with study.jsonl and study_name=search" in refusal(folder / "shared", **options)
    assert "belongs to one sweep directory" in refusal(folder / "b", str(folder / "private" / "optuna.jsonl"))


def test_wait_of_a_search_must_not_change(folder):
    create(folder / "none", wait=Wait.none)
    create(folder / "batch", wait=Wait.batch)
    create(folder / "default")
    for name, began, wait in (
        ("none", "none", Wait.batch),
        ("batch", "batch", Wait.none),
        ("default", "none", Wait.batch),
    ):
        line = refusal(folder / name, wait=wait)
        assert line.startswith(f"hydra.sweeper.wait: is {wait.value} but the search began with {began}; omit it")
        with check(folder / name).open(FACTS) as study:
            assert study.wait.value == began


def test_search_of_a_version_without_the_setting_continues_in_batches(folder):
    study = optuna.create_study(study_name="search", storage=open_storage(folder / "optuna.jsonl"))
    study.set_user_attr("facts", FACTS)
    study.ask()
    with place(folder).open(FACTS) as resumed:
        assert resumed.wait is Wait.batch
        assert len(resumed.trials()) == 1
    assert "began with batch" in refusal(folder, wait=Wait.none)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "postgresql+psycopg2://host/db",
            "needs the package psycopg2, which is not installed: install psycopg2 with pip",
        ),
        ("nonsense://host/db", "is not valid for SQLAlchemy"),
        ("sqlite:////missing/study.db", "the database cannot be used: unable to open database file; start it"),
        ("/missing/study.jsonl", "but the folder /missing does not exist; create it"),
    ],
)
def test_storage_that_cannot_be_used_is_refused(url, message, folder):
    line = refusal(folder / "a", url)
    assert line.startswith(f"hydra.sweeper.storage: is {url} ")
    assert message in line
    assert list(folder.iterdir()) == []


def test_tables_that_several_commands_create_at_the_same_time_are_used(folder, monkeypatch):
    """PostgreSQL reports an error to every command except the first, possibly several times."""
    failures = iter(["relation exists", "duplicate key"])
    create_all = models.BaseModel.metadata.create_all

    def create_later(engine):
        if (text := next(failures, None)) is not None:
            raise ProgrammingError("CREATE TABLE", None, Exception(text))
        create_all(engine)

    monkeypatch.setattr("foundry.run_dir.study_storage._RETRY_SECONDS", 0.0)
    monkeypatch.setattr(models.BaseModel.metadata, "create_all", create_later)
    create(folder / "a", f"sqlite:///{folder}/study.db")
    assert next(failures, None) is None


@pytest.mark.parametrize("method", ["get_all_studies", "create_new_study"])
def test_storage_that_stops_responding_before_the_search_begins_is_refused(method, folder, monkeypatch):
    def fail(*arguments):
        raise optuna.exceptions.StorageInternalError("no route to host")

    url = f"sqlite:///{folder}/study.db"
    monkeypatch.setattr(optuna.storages._CachedStorage, method, fail)
    with pytest.raises(ConfigError) as refused:
        place(folder, url).find() or create(folder, url)
    message = "but it does not respond: no route to host; start the same command again"
    assert str(refused.value) == f"hydra.sweeper.storage: is {url} {message}"


def test_file_of_another_user_is_refused(folder, monkeypatch):
    (folder / "study.jsonl").touch()

    def fail(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("optuna.storages.journal.JournalFileBackend", fail)
    line = refusal(folder / "a", "study.jsonl")
    assert line.startswith("hydra.sweeper.storage: is study.jsonl but the file cannot be opened: [Errno 13]")


def test_damaged_link_to_a_study_is_refused(folder):
    (folder / "study.json").write_text("{")
    assert refusal(folder, "study.jsonl").startswith(f"hydra.sweep.dir: is {folder}, but ")


def test_contradicting_settings_are_refused():
    lines = [str(line) for line in Search(metric="m", storage=" ", wait=Wait.batch, sampler={}).check()]
    assert "hydra.sweeper.storage: is empty; set the path of a file, a URL or null" in lines
    assert any(line.startswith("hydra.sweeper.wait: is batch but commands that share a study") for line in lines)
