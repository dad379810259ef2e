"""Tab completion of `foundry`: commands, their options, and overrides of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundry.commands.completion import OPTIONS
from foundry.commands.main import COMMANDS

FOUNDRY = Path(sys.executable).with_name("foundry")


@pytest.fixture
def completed(run_command):
    """Return a function that returns the completions of a command line."""

    def complete(line, shell="bash"):
        out, error = run_command("-sc", f"query={shell}", variables={"COMP_LINE": line})
        assert error == ""
        return out.removesuffix("\n").split("\n" if shell == "fish" else " ")

    return complete


def test_completion_covers_every_command():
    assert set(OPTIONS) == set(COMMANDS)


def test_first_word_completes_to_commands_and_overrides(completed):
    assert {"plan", "eval", "hparams=", "hparams.", "new"} <= set(completed("foundry "))
    assert completed("foundry ev") == ["eval", "evaluation.", "evaluation="]
    assert completed("foundry hparams.grad_clip") == ["hparams.grad_clip_norm="]
    assert completed("foundry --conf", shell="fish") == ["--config-dir", "--config-name", "--config-path"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("foundry sample pro", ["prompt=", "prompts="]),
        ("foundry sample device=", ["device=auto", "device=cpu", "device=cuda"]),
        ("foundry export merge=t", ["merge=true"]),
        ("foundry export which=", ["which=best", "which=last"]),
        ("foundry report dir=a/", ["dir=a/folder/", "dir=a/text.txt"]),
        ("foundry sync d", ["dir="]),
        ("foundry diff --", ["--help", "--json", "--version"]),
        ("foundry eval run=x max_n", ["max_new_tokens="]),
        ("foundry eval tasks=[x] n", ["num_fewshot="]),
        ("foundry eval run=policy epi", ["episodes="]),
        ("foundry eval run=policy data=", [""]),
        ("foundry unknown ", [""]),
    ],
)
def test_command_options_are_completed(line, words, completed, run_command):
    (run_command.cwd / "a/folder").mkdir(parents=True)
    (run_command.cwd / "a/text.txt").touch()
    (run_command.cwd / "policy").mkdir()
    (run_command.cwd / "policy/statistics.json").touch()
    assert completed(line) == words


def test_overrides_are_completed_after_the_options_of_a_command(completed):
    assert completed("foundry plan every=2 plan.rank") == ["plan.ranks=", "plan.ranks_per_node="]
    assert completed("foundry plan every=2 optimizer=muon rehea") == ["rehearse="]
    assert completed("foundry plan every=2 optimizer=muon optimizer.nest") == ["optimizer.nesterov="]
    assert completed("foundry eval run=x data=dig") == ["data=digits"]


@pytest.mark.long
def test_bash_completes_a_partial_option(tmp_path):
    script = (
        f'eval "$({FOUNDRY} -sc install=bash)"\n'
        'COMP_LINE="foundry report wa" COMP_CWORD=2 COMP_POINT=17\n'
        'hydra_bash_completion; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{FOUNDRY.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("watch=\n", "")
