"""A command started in a deleted folder reports the folder and no other error."""

import sys

import pytest
from support.composition import compose

from foundry.commands import sync
from foundry.commands.diff import DiffOptions
from foundry.commands.eval import EvalOptions
from foundry.commands.export import ExportOptions
from foundry.commands.report import ReportOptions
from foundry.commands.sample import SampleOptions
from foundry.config.command import command
from foundry.core.errors import ConfigError

LINE = "current folder: cannot be read (No such file or directory): it was deleted, moved or unmounted. Change to"
ARGUMENTS = {
    DiffOptions: ["run=a", "against=b"],
    EvalOptions: ["run=a"],
    ExportOptions: ["run=a", "out=b"],
    ReportOptions: ["dir=a"],
    SampleOptions: ["run=a"],
}


@pytest.fixture
def _in_deleted_folder(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("_in_deleted_folder")
@pytest.mark.parametrize(
    "overrides", [[], ["hparams.lr=1e-3"], ["data=text", "data.path=x"], ["model=dit"], ["hparams=llm", "hparams.lr=x"]]
)
def test_compose_reports_only_the_deleted_current_folder(overrides):
    with pytest.raises(ConfigError) as refused:
        compose(*overrides)
    (violation,) = refused.value.violations
    assert str(violation).startswith(LINE)


@pytest.mark.usefixtures("_in_deleted_folder")
@pytest.mark.parametrize("schema", ARGUMENTS, ids=lambda schema: schema.__name__)
def test_commands_fail_in_a_deleted_current_folder_but_print_help(schema, monkeypatch, capsys):
    runs = []
    monkeypatch.setattr(sys, "argv", ["command", *ARGUMENTS[schema]])
    with pytest.raises(SystemExit) as ended:
        command(schema, runs.append, name="command", doc="doc")
    assert (ended.value.code, runs) == (2, [])
    assert capsys.readouterr().err.startswith(LINE)
    sys.argv.append("--help")
    command(schema, runs.append, name="command", doc="doc")
    assert "python -m command" in capsys.readouterr().out


@pytest.mark.usefixtures("_in_deleted_folder")
def test_sync_fails_in_a_deleted_current_folder(capsys):
    assert sync.run(["dir=a"]) == 2
    assert capsys.readouterr().err.startswith(LINE)
