"""Outputs of commands do not overwrite files of a run or files that the command has not written."""

import json
from io import StringIO

import pytest
from rich.console import Console
from support.evaluated import evaluate

from foundry.commands.diff import DiffOptions
from foundry.commands.diff import print_differences as diff
from foundry.commands.export import ExportOptions, export
from foundry.commands.sample import SampleOptions, sample
from foundry.core.errors import ConfigError
from foundry.planning import report as plan_report
from foundry.run_dir.marker import mark
from foundry.run_dir.outputs import folder_refusal, has_columns, has_keys, is_picture, refusal
from foundry.sweeps.report import report

COMMANDS = {
    "eval out": lambda run, path: evaluate(run=run, out=path),
    "eval record": lambda run, path: evaluate(run=run, record=path),
    "sample out": lambda run, path: sample(SampleOptions(run=run, out=path)),
    "export out": lambda run, path: export(ExportOptions(run=run, out=path)),
    "diff picture": lambda run, path: diff(DiffOptions(run=run, against=run, picture=path)),
}
TAKEN = {
    "eval out": [
        "run/config.yaml",
        "run/status.json",
        "run/checkpoints/x.json",
        "thesis.txt",
        "data.json",
        "link",
        "new/../thesis.txt",
    ],
    "eval record": ["run", "run/checkpoints", "run/checkpoints/new", "run/.hydra", "films", "thesis.txt"],
    "sample out": ["thesis", "drawing", "run/checkpoints/x", "run/.hydra/x", "link/x/y"],
    "export out": ["run", "run/checkpoints/new", "run/transformers", "run/plots", "films", "thesis.txt", "link"],
    "diff picture": ["drawing.png", "run/checkpoints/x.png", "run/.hydra/x.png"],
}


@pytest.fixture
def home(tmp_path):
    """A folder with a run and user files."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    mark(run)
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "status.json").write_text("{}\n")
    (run / "statistics.json").write_text("{}\n")
    (tmp_path / "films").mkdir()
    for name in ("thesis.txt", "drawing.png", "data.json", "films/rollouts.jsonl"):
        (tmp_path / name).write_text('{"mine": 1}\n')
    (tmp_path / "link").symlink_to(run / "config.yaml")
    return tmp_path


def contents(folder):
    """Return the content of each file, and None for each folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, names in TAKEN.items() for name in names])
def test_existing_or_reserved_output_path_is_rejected_early(home, command, name):
    before = contents(home)
    with pytest.raises(ConfigError) as refused:
        COMMANDS[command](str(home / "run"), str(home / name))
    assert [wrong.key for wrong in refused.value.violations] == [command.partition(" ")[2]]
    assert "choose another" in str(refused.value)
    assert contents(home) == before


def test_new_paths_and_earlier_outputs_are_accepted(home):
    run, earlier = home / "run", home / "eval.json"
    earlier.write_text('{"checkpoint": "step_00000003", "loss": 1.0}')
    (run / "eval.json").write_text(earlier.read_text())
    known = has_keys("checkpoint")
    assert refusal(earlier, is_earlier=known) is None
    assert refusal(run / "eval.json", own_output="eval.json", is_earlier=known) is None
    assert refusal(run / "eval.json") is not None
    assert refusal(run / "mine.json") is refusal(run / "plots" / "mine.png") is None
    assert folder_refusal(run / "exported") is folder_refusal(home / "new") is None
    assert refusal(home / "checkpoints") is None  # not in a run directory


@pytest.mark.parametrize("content", ["", "[]", "{", '{"mine": 1}', "\ud800".encode("utf-8", "surrogatepass")])
def test_earlier_output_is_recognized_by_its_content(tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert not has_keys("checkpoint")(file)
    assert not has_columns("job")(file)
    assert not is_picture(file)


@pytest.mark.parametrize("name", ["report.csv", "report.json", "report.png"])
def test_report_does_not_overwrite_foreign_files(tmp_path, name):
    run = tmp_path / "one"
    run.mkdir()
    (run / "status.json").write_text(json.dumps({"state": "finished", "reason": None, "step": 1, "config_hash": "x"}))
    (run / "config.yaml").write_text("seed: 0\n")
    (tmp_path / name).write_text("job,mine\n1,2\n")
    before = contents(tmp_path)
    console = Console(file=StringIO())
    with pytest.raises(ConfigError, match=f"^{name}: is .* is not an earlier output.* move it away"):
        report(tmp_path, console)
    assert contents(tmp_path) == before
    (tmp_path / name).unlink()
    for _ in range(2):  # the second report replaces the files of the first
        report(tmp_path, console)
        assert (tmp_path / name).is_file()


def test_plan_recognizes_its_earlier_schedule_csv(tmp_path):
    file = plan_report.write_csv([], tmp_path)
    assert plan_report.RECOGNIZERS[file.name](file)
    file.write_text("step,mine\n")
    assert not plan_report.RECOGNIZERS[file.name](file)
