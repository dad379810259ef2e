"""`foundry COMMAND`: selection of the command, and errors for unknown words."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from foundry.commands import main as entry
from foundry.commands.main import COMMANDS, main
from foundry.config.diagnostics.flags import find_word

PACKAGE = Path(entry.__file__).parent
NO_COMMANDS = {"__init__", "completion", "composed_command", "data_eval", "library", "main", "model_card", "task_eval"}


@pytest.fixture
def started(monkeypatch):
    """Return a function that calls `main` and returns the started command with its arguments."""

    def start(*arguments, **own):
        seen = []

        def import_module(name):
            module = type(sys)(name)
            module.main = lambda: seen.append((name.removeprefix("foundry.commands."), sys.argv[1:]))
            return module

        monkeypatch.setattr(entry, "import_module", import_module)
        monkeypatch.setattr(sys, "argv", ["foundry", *arguments])
        main(**own)
        return seen[0]

    return start


@pytest.mark.parametrize(
    ("arguments", "command", "passed_on"),
    [
        ([], "train", []),
        (["hparams.lr=1", "+a.b=eval", "++c=d", "~debug", "~x=plan"], "train", None),
        (["--cfg", "job", "--config-dir", "plan", "--config-name=eval", "-p", "diff", "-cn", "new"], "train", None),
        (["--info", "defaults", "-m", "a=1,2", "-"], "train", None),
        (["--lr", "plan", "eval", "hparams.seed=1"], "train", None),
        (["train", "hparams.lr=1"], "train", ["hparams.lr=1"]),
        (["eval", "run=x", "sample"], "eval", ["run=x", "sample"]),
        (["--info", "plan", "a=1"], "plan", ["--info", "a=1"]),
        (["--config-dir", "own", "a=1", "plan", "b=2"], "plan", ["--config-dir", "own", "a=1", "b=2"]),
        (["query=bash", "plan"], "plan", ["query=bash"]),
        (["-sc", "query=bash"], "completion", ["-sc", "query=bash"]),
        (["--json", "--multi", "plan"], "plan", ["--json", "--multi"]),
        (["--help", "eval"], "eval", ["--help"]),
        (["help", "lr_find"], "lr_find", ["--help"]),
        (["help"], "train", ["--help"]),
        (["diff", "eval", "plan"], "diff", ["eval", "plan"]),
    ],
)
def test_first_word_that_is_no_override_selects_the_command(arguments, command, passed_on, started):
    assert started(*arguments) == (command, arguments if passed_on is None else passed_on)


def test_project_config_flags_apply_to_composing_commands_only(started):
    own = {"config_dir": Path("conf"), "config_name": "mine"}
    flags = ["--config-dir", "conf", "--config-name", "mine"]
    assert started("plan", "a=1", **own) == ("plan", [*flags, "a=1"])
    assert started("a=1", **own) == ("train", [*flags, "a=1"])
    assert started("eval", "run=x", **own) == ("eval", ["run=x"])


def test_find_word_skips_overrides_and_flag_values():
    assert find_word(["a=1", "~b", "-c", "job"]) is None
    assert find_word(["a=1", "word", "other"]) == 1


def test_every_command_module_is_listed_in_the_help(run_command):
    assert {path.stem for path in PACKAGE.glob("*.py")} - NO_COMMANDS == set(COMMANDS)
    page, _ = run_command("--help")
    for name in COMMANDS:
        assert callable(importlib.import_module(f"foundry.commands.{name}").main)
        assert f"foundry {name}" in page
    assert page.index("foundry plan OVERRIDES") < page.index("hparams=")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["evla", "run=x"], "evla: unknown command; did you mean eval? (commands: train, plan, "),
        (["lr-find"], "lr-find: unknown command; did you mean lr_find? (commands: "),
        (["diffusion"], "diffusion: is not of the form key=value; did you mean hparams=diffusion?"),
        (["fsdp"], "fsdp: is not of the form key=value; did you mean distributed=fsdp?"),
        (["difusion"], "difusion: is not of the form key=value; did you mean hparams=diffusion?"),
        (["lr"], "lr: is not of the form key=value; write hparams.lr=..."),
        (["hparams.lr"], "hparams.lr: is not of the form key=value; write hparams.lr=..."),
        (["optimizer"], "optimizer: is not of the form key=value; write optimizer=..."),
        (["b]"], "b]: is not of the form key=value; quote values with spaces, "),
        (["plan", "diffusion"], "diffusion: is not of the form key=value; did you mean hparams=diffusion?"),
        (["eval", "rum=x", "run=y"], "rum: is not an option; did you mean run?"),
    ],
)
def test_unknown_word_gives_a_one_line_error(words, line, run_command):
    out, error = run_command(*words, code=2)
    assert out == ""
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_words_without_a_key_are_reported_with_other_config_errors(run_command):
    _, error = run_command("diffusion", "hparams.lr=-1", code=2)
    assert [line.partition(":")[0] for line in error.splitlines()] == ["diffusion", "hparams.lr"]


def test_help_pages_do_not_import_torch(tmp_path):
    for words in (["--help"], ["eval", "--help"], ["help", "plan"]):
        code = (
            f"import sys; sys.argv = ['foundry', *{words!r}]\n"
            "from foundry.commands.main import main\n"
            "try: main()\n"
            "except SystemExit: pass\n"
            "sys.exit(3 if 'torch' in sys.modules else 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("foundry ")


def test_command_equals_running_its_module(run_command):
    for words in (["report", "dir=nowhere"], ["export", "run=nowhere", "out=new"]):
        assert run_command(*words, code=2) == run_command(*words[1:], module=f"foundry.{words[0]}", code=2)
