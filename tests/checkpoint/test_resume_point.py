"""Choice of the checkpoint to resume from, and errors that must not restart a run from scratch."""

import errno
import json
import os

import pytest
from support.checkpoint_parts import ALONE, Net, rewrite_manifest, write
from support.composition import configure

from foundry.checkpoint.folder import FORMAT, Manifest, problems, read_manifest
from foundry.checkpoint.resume_point import ResumePoint, check_base, check_config, check_data, find_resume_point
from foundry.config.record.frozen import plain
from foundry.config.record.resume_compat import REMEDY
from foundry.config.schemas.checkpoint import OnChangedConfig
from foundry.core.errors import ConfigError
from foundry.run_dir.checkpoints import MANIFEST, list_checkpoints

SHARD, RANK = "shard-00000.safetensors", "rank-00000.json"
ERRNOS = ["EACCES", "EPERM", "EIO", "EMFILE", "ENFILE", "ESTALE", "ENOMEM", "ENOLCK", "ETIMEDOUT", "EREMOTEIO"]


def tree(folder):
    """Return every path below a folder, with file contents."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def failing(monkeypatch):
    """Return `fail(name, number)`: opening or listing a path that ends with `name` then raises an OSError."""

    def fail(name, number):
        def wrap(original):
            def call(path, *args, **options):
                if str(path).endswith(name) and not str(path).endswith(f"/.{name}"):
                    raise OSError(number, os.strerror(number), str(path))
                return original(path, *args, **options)

            return call

        for function in ("open", "listdir", "scandir"):
            monkeypatch.setattr(os, function, wrap(getattr(os, function)))

    return fail


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("name", [SHARD, RANK, MANIFEST, "checkpoints"])
@pytest.mark.parametrize("resume", ["auto", "path"])
def test_unreadable_checkpoint_ends_the_run_and_changes_nothing(tmp_path, monkeypatch, failing, name, number, resume):
    for step in (1, 2):
        write(tmp_path, step, Net(step))
    before, code = tree(tmp_path), getattr(errno, number)
    failing(name, code)
    run_dir, asked = (tmp_path, "auto") if resume == "auto" else (tmp_path / "other", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        find_resume_point(asked, run_dir, ALONE)
    (violation,) = refused.value.violations
    assert violation.key == "checkpoint.resume"
    assert name in violation.message
    assert os.strerror(code) in violation.message
    assert "\n" not in violation.message
    monkeypatch.undo()
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_permission_error_is_not_taken_for_a_missing_checkpoint(tmp_path):
    """A child process runs the check as an unprivileged user, since root can read every file."""
    folder = write(tmp_path, 1, Net(1))
    for path in [*tmp_path.parents[:3], tmp_path, folder.parent, folder, *folder.iterdir()]:
        path.chmod(0o755)
    for locked in (folder / SHARD, folder / MANIFEST, folder, folder.parent, tmp_path):
        mode = locked.stat().st_mode
        locked.chmod(0)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.setgid(65534)
            os.setuid(65534)
            try:
                text = str(find_resume_point("auto", tmp_path, ALONE))
            except ConfigError as error:
                text = str(error)
            os.write(writing, text.encode())
            os._exit(0)
        os.waitpid(child, 0)
        text = os.read(reading, 10_000).decode()
        locked.chmod(mode)
        assert "Permission denied" in text
        assert text.startswith("checkpoint.resume: is auto, but")
    assert problems(folder) == []


def test_newer_manifest_format_names_the_version_to_use(tmp_path):
    folder = write(tmp_path, 1, Net(1))
    rewrite_manifest(folder, format=FORMAT + 1, versions={"foundry": "99.1"}, shape="new")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=rf"format {FORMAT + 1}.*foundry 99\.1 or later"):
        find_resume_point("auto", tmp_path, ALONE)
    assert tree(tmp_path) == before
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, "checksum": "of another kind"}))
    assert "or later" in problems(folder)[0]


UNKNOWN = {"number": 1, "list": [1, {}], "nested": {"a": {"b": None}}, "text": "x", "Infinity": "-Infinity"}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_manifest_fields_are_ignored(tmp_path, name):
    folder = write(tmp_path, 1, Net(1))
    before = read_manifest(folder)
    rewrite_manifest(folder, **{f"new_{name}": UNKNOWN[name]})
    files = json.loads((folder / MANIFEST).read_text())["files"]
    rewrite_manifest(folder, files={file: {**facts, "new": UNKNOWN[name]} for file, facts in files.items()})
    assert problems(folder) == []
    assert read_manifest(folder) == before
    assert find_resume_point("auto", tmp_path, ALONE).folder == folder


OPTIONAL = ("format", "samples", "tokens", "config_hash", "config", "strategy", "state", "world_size", "versions")


@pytest.mark.parametrize("name", OPTIONAL)
def test_missing_manifest_field_has_its_default(tmp_path, name):
    folder = write(tmp_path, 1, Net(1))
    rewrite_manifest(folder, **{name: None})
    assert problems(folder) == []
    assert getattr(read_manifest(folder), name) == getattr(type(read_manifest(folder))(step=1), name)


def test_manifest_without_a_step_is_not_renamed_as_corrupt(tmp_path):
    folder = write(tmp_path, 1, Net(1))
    rewrite_manifest(folder, step=None)
    with pytest.raises(ConfigError, match="no step"):
        find_resume_point("auto", tmp_path, ALONE)
    assert list_checkpoints(tmp_path) == [folder]


VALUES = ["x", [1], {}, True, -1, 1.5, 1e300, 2**63, 10**400]


@pytest.mark.parametrize("name", ["step", "samples", "tokens", "world_size", "format"])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_invalid_manifest_number_is_refused_and_changes_nothing(tmp_path, name, value):
    rewrite_manifest(write(tmp_path, 1, Net(1)), **{name: value})
    before = tree(tmp_path)
    with pytest.raises(ConfigError) as refused:
        find_resume_point("auto", tmp_path, ALONE)
    (violation,) = refused.value.violations
    assert violation.key == "checkpoint.resume"
    assert str(violation).isprintable()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["latest", "best"])
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_link_name_taken_by_a_file_or_folder_is_refused(tmp_path, name, kind, resume):
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir()
    path.mkdir() if kind == "folder" else path.touch()
    with pytest.raises(ConfigError, match=rf"checkpoint\.resume: .*checkpoints/{name} is a {kind}"):
        find_resume_point(resume, tmp_path, ALONE)


@pytest.mark.parametrize("put_aside", [False, True])
def test_run_with_only_damaged_checkpoints_is_not_restarted(tmp_path, put_aside):
    folders = [write(tmp_path, step, Net(step)) for step in (1, 2)]
    for folder in folders:
        (folder / RANK).unlink()
        if put_aside:
            folder.rename(folder.with_name(f"{folder.name}.corrupt"))
    before = tree(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="to start from scratch, move that folder away") as refused:
            find_resume_point("auto", tmp_path, ALONE)
        assert "step_00000001" in str(refused.value)
    assert tree(tmp_path) == before
    (tmp_path / "checkpoints").rename(tmp_path / "old")
    assert find_resume_point("auto", tmp_path, ALONE) is None


def test_only_damaged_checkpoints_newer_than_a_good_one_are_renamed(tmp_path):
    folders = [write(tmp_path, step, Net(step)) for step in (1, 2, 3)]
    for folder in (folders[0], folders[2]):
        (folder / RANK).unlink()
    assert find_resume_point("auto", tmp_path, ALONE).folder == folders[1]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000001", "step_00000002", "step_00000003.corrupt"]


@pytest.mark.parametrize("link", ["latest", "best"])
def test_checkpoint_link_is_accepted_as_resume_path(tmp_path, link):
    folder = write(tmp_path / "run", 1, Net(1), is_best=True)
    resume_point = find_resume_point(str(folder.parent / link), tmp_path / "new", ALONE)
    assert resume_point.folder == folder.resolve()


def test_missing_manifest_state_is_a_config_error(tmp_path):
    write(tmp_path, 1, Net(1), state={"best": {"step": 3}})
    state = find_resume_point("auto", tmp_path, ALONE).state
    assert state["best"]["step"] == 3
    for ask in (lambda: state["schedule"], lambda: state["best"]["value"]):
        with pytest.raises(ConfigError, match=r"leads to a checkpoint without (schedule|value) in its state"):
            ask()


FILES = "33199e76c6d9" + "0" * 52
DATA = {"path": "a.txt", "validation_path": None, "weights": None, "seq_len": 16, "tokenizer": None}
IDENTITY = {"content": f"{FILES}-16", "order": "x", "samples": 9, "tokenizer": "a" * 64}
CHANGES = {
    "path": ({"path": "b.txt"}, {"content": "4" * 64}, "data.path", "(content 33199e76c6d9 -> 444444444444)"),
    "validation": ({"validation_path": "b.txt"}, {"content": "4" * 64}, "data.validation_path", "-> 444444444444)"),
    "file": ({}, {"content": "4" * 64}, "data.path", "(content 33199e76c6d9 -> 444444444444)"),
    "weights": ({"weights": [0.5, 0.5]}, {"content": f"{FILES}-16-[0.5, 0.5]"}, "data.weights", "…00000-16-[0."),
    "length": ({"seq_len": 32}, {"content": f"{FILES}-32"}, "data.seq_len", "-16 -> …0000000-32)"),
    "template": ({"chat_template": "chatml"}, {"content": f"{FILES}-16-<"}, "data.chat_template", "…00000-16-<)"),
    "tokenizer": ({"tokenizer": "t.json"}, {"tokenizer": "b" * 64}, "data.tokenizer", "(tokenizer aaaaaaaaaaaa -> bbb"),
    "samples": ({"held_out": 0.2}, {"samples": 8}, "data.held_out", "(samples 9 -> 8)"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("on_changed", OnChangedConfig)
def test_changed_data_error_names_the_setting_and_the_difference(name, on_changed, caplog):
    changed, identity, key, texts = CHANGES[name]
    point = ResumePoint(None, Manifest(step=1, config={"data": DATA}, data=IDENTITY))
    if on_changed is OnChangedConfig.error:
        with pytest.raises(ConfigError) as refused:
            check_data(point, IDENTITY | identity, DATA | changed, on_changed)
        (violation,) = refused.value.violations
        assert violation.key == key
        assert violation.message.endswith(REMEDY)
        message = violation.message
    else:
        check_data(point, IDENTITY | identity, DATA | changed, on_changed)
        (message,) = caplog.messages
        assert message.startswith(f"resumed although {key}: ")
        assert "on_changed_config" not in message
    assert texts in message
    one, _, other = message.partition(") ")[0].rpartition("(")[2].split(" ", 1)[1].partition(" -> ")
    assert one != other


def test_setting_unknown_to_this_version_is_ignored_with_its_name(caplog):
    config = configure()
    was = plain(config)
    was["model"]["forgotten"] = 3
    check_config(ResumePoint(None, Manifest(step=1, config=was)), config, plain(config), OnChangedConfig.error)
    assert caplog.messages == [
        "ignored model.forgotten=3 of the checkpoint: this version of foundry does not have the setting"
    ]


def test_changed_base_warning_omits_an_active_remedy(caplog):
    point = ResumePoint(None, Manifest(step=1, base={"digest": "aa", "path": "old"}))
    check_base(point, {"digest": "bb", "path": "new"}, OnChangedConfig.warn)
    (message,) = caplog.messages
    assert message.endswith("at old (digest aa -> bb)")
    with pytest.raises(ConfigError, match="or set checkpoint"):
        check_base(point, {"digest": "bb", "path": "new"}, OnChangedConfig.error)
