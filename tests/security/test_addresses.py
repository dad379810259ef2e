"""Commands mask the user and password of a URL that is passed in place of a local path."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.composition import compose
from support.evaluated import evaluate
from support.examples import examples

from foundry.commands.diff import DiffOptions
from foundry.commands.diff import print_differences as diff
from foundry.commands.export import ExportOptions, export
from foundry.commands.plan import PlanOptions, plan
from foundry.commands.report import ReportOptions
from foundry.commands.report import print_report as report
from foundry.commands.sample import SampleOptions, sample
from foundry.commands.sync import run as sync
from foundry.config.command import command, folder_option, print_path
from foundry.core.errors import ConfigError
from foundry.run_dir.redact import masked_text
from foundry.tasks.robots.names import STATISTICS

PASSWORD = "hunter2"
ADDRESS = f"http://bob:{PASSWORD}@h/x"
AROUND = [("", ""), ("is ", " but"), ("'", "'"), ("/cwd/", ""), ("a=", "")]


@given(
    scheme=st.sampled_from(["http", "HTTP", "s3", "postgresql", "git+ssh", "a"]),
    user=st.text("abz09.-_%", max_size=6),
    password=st.one_of(st.text("abz09.-_%:@&+~!$", max_size=8), st.text("abz09.-_%:/?#'", max_size=8)),
    is_path=st.booleans(),
    around=st.sampled_from(AROUND),
)
@settings(max_examples=examples(500), deadline=None)
def test_masked_text_of_any_address_has_no_password(scheme, user, password, is_path, around):
    address = f"{scheme}://{user}:x{password}{PASSWORD}@host/path"
    masked = masked_text(f"{around[0]}{Path(address) if is_path else address}{around[1]}")
    assert PASSWORD not in masked
    assert masked.endswith(f"@host/path{around[1]}")
    assert masked_text(masked) == masked


SETTINGS = {
    "model.path of a base": ["model=base", "model.path={}"],
    "model.path of transformers": ["model=hf_gpt2", "model.path={}"],
    "model.init_from": ["model.init_from={}"],
    "objective.teacher": ["objective=distillation", "data=chats", "data.path=.", "objective.teacher={}"],
    "data.path": ["data=text", "data.path={}"],
    "data.path in a list": ["data=text", "data.path=[{},{}]"],
    "data.validation_path": ["data=text", "data.path=.", "data.validation_path={}"],
    "data.tokenizer": ["data=text", "data.path=.", "data.tokenizer={}"],
    "data.chat_template": ["data=chats", "data.path=.", "data.chat_template={}"],
    "data.cache_dir": ["data.cache_dir={}"],
    "checkpoint.resume": ["checkpoint.resume={}"],
    "tracking.uri": ["tracking.uri={}"],
    "hydra.run.dir": ["hydra.run.dir={}"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_errors_mask_the_password_of_an_address(name):
    with pytest.raises(ConfigError) as refused:
        compose(*(word.format(f"'{ADDRESS}'", f"'{ADDRESS}'") for word in SETTINGS[name]))
    assert PASSWORD not in str(refused.value)
    assert "http:/*" not in str(refused.value), "an address keeps its slashes until it is masked"


@pytest.mark.parametrize("name", ["model.path of a base", "objective.teacher"])
def test_setting_that_names_a_folder_refuses_an_address(name):
    key = name.split()[0]
    with pytest.raises(ConfigError, match=rf"{key}: is http://\*\*\*@h/x, a URL; give a path on this machine"):
        compose(*(word.format(f"'{ADDRESS}'") for word in SETTINGS[name]))


OPTIONS = {
    "eval run": lambda: evaluate(run=ADDRESS, out="out.json"),
    "eval out": lambda: evaluate(run="run", out=ADDRESS),
    "eval record": lambda: evaluate(run="run", record=ADDRESS),
    "eval against": lambda: evaluate(run="run", against=ADDRESS),
    "sample run": lambda: sample(SampleOptions(run=ADDRESS, out="out.txt")),
    "sample out": lambda: sample(SampleOptions(run="run", out=ADDRESS)),
    "export run": lambda: export(ExportOptions(run=ADDRESS, out="new")),
    "export out": lambda: export(ExportOptions(run="run", out=ADDRESS)),
    "report dir": lambda: report(ReportOptions(dir=ADDRESS)),
    "diff run": lambda: diff(DiffOptions(run=ADDRESS, against="run")),
    "diff against": lambda: diff(DiffOptions(run="run", against=ADDRESS)),
    "diff picture": lambda: diff(DiffOptions(run="run", against="run", picture=ADDRESS)),
    "plan plan.measured": lambda: plan(None, PlanOptions(measured=ADDRESS), Path("run")),
}


IN_A_STORE = {"eval run", "sample run", "export run", "report dir", "diff run", "diff against"}
"""Options that may be the URL of a run in a store."""


@pytest.mark.parametrize("name", OPTIONS)
def test_command_refuses_an_address_for_a_path_and_makes_no_folder(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STATISTICS).touch()  # makes it a policy run, which has the options record and against
    with pytest.raises(ConfigError) as refused:
        OPTIONS[name]()
    key, is_path = name.split()[1], "is http://***@h/x, a URL; give a path on this machine"
    is_store = (
        "has a user name or password; leave them out, and set credentials in the environment (given: http://***@h/x)"
    )
    assert str(refused.value) == f"{key}: {is_store if name in IN_A_STORE else is_path}"
    assert PASSWORD not in "".join(capsys.readouterr())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("scheme", ["http", "HTTPS", "s3", "git+ssh", "a", "sqlite"])
def test_folder_option_rejects_addresses_of_any_scheme(scheme):
    with pytest.raises(ConfigError, match=r"out: is .*://\*\*\*@h/x, a URL; give a path on this machine"):
        folder_option("out", f"{scheme}://bob:{PASSWORD}@h/x")
    assert folder_option("out", f"a:b/{scheme}/x") == Path(f"a:b/{scheme}/x")


@pytest.mark.parametrize(
    "arguments", [[f"dir={ADDRESS}"], ["dir=.", f"uri={ADDRESS}"], ["dir=nowhere", f"uri={ADDRESS}"]]
)
def test_sync_masks_the_password_of_an_address(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sync(arguments)
    assert PASSWORD not in "".join(capsys.readouterr())


def test_path_with_the_form_of_an_address_is_printed_without_its_user(capsys):
    print_path(Path(ADDRESS), "picture ")
    assert capsys.readouterr().out == "picture http:/***@h/x\n"


def test_traceback_of_a_command_has_no_secrets(monkeypatch, capsys):
    def fail(options):
        raise RuntimeError(f"cannot reach {ADDRESS}")

    monkeypatch.setattr("sys.argv", ["foundry.report", "dir=."])
    with pytest.raises(SystemExit) as ended:
        command(ReportOptions, fail, name="foundry.report", doc="report")
    error = capsys.readouterr().err
    assert ended.value.code == 1
    assert "in fail" in error
    assert error.endswith("RuntimeError: cannot reach http://***@h/x\n")
