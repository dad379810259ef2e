"""Names and paths with shell metacharacters are quoted in batch scripts."""

import os
import shutil
import subprocess
import sys

import pytest
from support.composition import compose

from foundry.config.schemas.launcher import Slurm
from foundry.config.setting import check_fields
from foundry.core.errors import ConfigError
from foundry.launch.slurm.submission import _environment_of_job, _executor

NASTY = [
    "it's",
    "two words",
    "$(touch pwned)",
    '"quoted"',
    "`touch pwned`",
    "a;touch pwned",
    "back\\slash",
    "*",
    "&& x",
]


@pytest.fixture
def srun(tmp_path_factory, monkeypatch):
    """A no-op `srun` on PATH: submitit requires one to write a script, and Slurm may not be installed."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "srun").symlink_to(shutil.which("true"))
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def script(tmp_path, **settings):
    settings = {"submitit_folder": str(tmp_path / "%j"), "name": "foundry", **settings}
    executor = _executor(Slurm(**settings), None, [])._executor
    return executor._make_submission_file_text(executor._submitit_command_str, "uid")


def test_job_survives_signals_sent_before_handlers_are_installed(srun, tmp_path):
    (command,) = (line for line in script(tmp_path).splitlines() if line.startswith("srun "))
    start = command[command.index("sh -c ") :].partition(" -u -m ")[0]
    code = (
        "import os, signal; [os.kill(os.getpid(), getattr(signal, f'SIG{name}')) for name in ('USR1', 'USR2', 'TERM')]"
    )
    assert subprocess.run(["bash", "-c", f'{start} -c "{code}"'], check=False).returncode == 0


@pytest.mark.parametrize("name", NASTY)
def test_python_path_of_a_job_quotes_folder_names(name, tmp_path, monkeypatch):
    here, code = tmp_path / name, tmp_path / f"code {name}"
    here.mkdir()
    monkeypatch.chdir(here)
    for folder in (here, code):
        (folder / "own parts").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(here), str(here / "own parts"), "/elsewhere"])
    lines = [*_environment_of_job(code), 'printf "%s" "$PYTHONSAFEPATH $PYTHONPATH"']
    for given, rest in (({"PYTHONPATH": "two words"}, ":two words"), ({}, "")):
        done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env=given, check=True)
        assert done.stdout == f"1 {code}:{code}/own parts{rest}"
    assert "PYTHONPATH=" not in _environment_of_job(None)[-1]
    (here / "own parts").rmdir()
    assert sorted(path.name for path in here.iterdir()) == []


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.usefixtures("srun")
def test_batch_script_quotes_shell_metacharacters(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = {"name": name, "comment": name, "account": name, "submitit_folder": f"{tmp_path}/{name}/%j"}
    text = script(tmp_path, **fields, additional_parameters={"reservation": name})
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, check=False, capture_output=True, timeout=60)
    assert not (tmp_path / "pwned").exists()
    wanted = [line for line in script(tmp_path).splitlines() if line and not line.startswith("#")]
    got = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(got) == len(wanted), "no line more than with a plain name"


FIELDS = (
    "name",
    "comment",
    "partition",
    "qos",
    "account",
    "constraint",
    "exclude",
    "gres",
    "mem_per_gpu",
    "submitit_folder",
)


@pytest.mark.parametrize("text", ["a\ntouch pwned", "a\rb", "a\x1b[2Jb", "a\x00b", "a\u2028b", "a\x85b"])
def test_slurm_settings_reject_control_characters(text):
    for field in FIELDS:
        (found,) = [*check_fields(Slurm(**{field: text}), "hydra.launcher")]
        assert found.key == f"hydra.launcher.{field}"
    for more in ({"setup": [text]}, {"additional_parameters": {"reservation": text}}):
        assert any("control character" in violation.message for violation in Slurm(**more).check(1))
    assert any(
        "not the name of an sbatch option" in str(violation)
        for violation in Slurm(additional_parameters={text: "x"}).check(1)
    )


@pytest.mark.parametrize("name", ["mail-type", "mail_user", "reservation"])
def test_slurm_accepts_additional_sbatch_options(name):
    assert not list(Slurm(additional_parameters={name: "x"}, setup=["module load\tcuda"]).check(1))


@pytest.mark.parametrize("word", ['hydra.launcher.comment="a\nb"', 'hydra.launcher.setup=["a\nb"]'])
def test_line_breaks_in_slurm_settings_are_rejected_at_composition(word):
    with pytest.raises(ConfigError, match=r"hydra.launcher.(comment|setup): is .*(line break|character)"):
        compose("hydra/launcher=slurm", "hydra.mode=MULTIRUN", word)
