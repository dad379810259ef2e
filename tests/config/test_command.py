"""Options of `python -m foundry.<name> key=value`."""

import os
import pty
import subprocess
import sys
from dataclasses import dataclass

import pytest

from foundry.commands.export import ExportOptions
from foundry.commands.sample import SampleOptions
from foundry.config.command import parse_options
from foundry.config.setting import setting
from foundry.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = setting("???", "run directory")
    out: str = setting("???", "file to write")
    num_tokens: int = setting(10, "tokens", ge=1)
    temperature: float | None = setting(None, "temperature", ge=0)
    labels: list[int] | None = setting(None, "classes")
    ema: bool = setting(True, "averaged weights")


def test_overrides_become_typed_options():
    overrides = ["run=runs/a b", "out=x", "num_tokens=5", "temperature=0.5", "labels=[3,1]", "ema=false"]
    expected = Options(run="runs/a b", out="x", num_tokens=5, temperature=0.5, labels=[3, 1], ema=False)
    assert parse_options(Options, overrides) == expected
    assert parse_options(Options, ["run=a", "out=b"]) == Options(run="a", out="b")
    assert parse_options(Options, ["run=a", "out=b", "temperature=null"]).temperature is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_tokns=5"], "num_tokns: is not an option; did you mean num_tokens? (options: run, out, num_tokens,"),
        (["zzz=5"], "zzz: is not an option (options: run, out,"),
        (["num_tokens=five"], "num_tokens: is five but must be a whole number"),
        (["num_tokens=0"], "num_tokens: is 0 but must be at least 1"),
        (["temperature=-1"], "temperature: is -1 but must be at least 0"),
        (["ema=maybe"], "ema: is maybe but must be true or false"),
        (["labels=3"], "labels: "),
        (["5"], "5: is not of the form key=value"),
        (["num_tokens=[1"], "num_tokens=[1: is not of the form key=value"),
    ],
)
def test_invalid_option_gives_a_one_line_error(overrides, message):
    with pytest.raises(ConfigError) as refused:
        parse_options(Options, ["run=a", "out=b", *overrides])
    assert len(refused.value.violations) == 1
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(message)


def test_all_option_errors_are_reported_together():
    with pytest.raises(ConfigError) as refused:
        parse_options(Options, ["nonsense", "runn=a", "num_tokens=x"])
    keys = [violation.key for violation in refused.value.violations]
    assert keys == ["nonsense", "runn", "num_tokens", "out", "run"]
    assert "out: has no value; give it as out=..." in str(refused.value)


@pytest.mark.parametrize("schema", [SampleOptions, ExportOptions])
def test_sample_and_export_require_a_run(schema):
    with pytest.raises(ConfigError, match="run: has no value; give it as run="):
        parse_options(schema, [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("foundry.sample", ["run", "which", "out", "seed", "prompt", "max_new_tokens", "labels", "guidance_scale"]),
        ("foundry.export", ["run", "out", "which", "ema"]),
    ],
)
def test_command_help_does_not_import_torch(module, options):
    code = (
        f"import runpy, sys; sys.argv = ['{module}', '--help']; runpy.run_module('{module}', run_name='__main__'); "
        "sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m {module} key=value" in done.stdout
    lines = done.stdout.splitlines()
    for option in options:
        line = next(line for line in lines if line.split()[:1] == [option])
        assert "(required)" in line or "(default" in line
    assert "(required)" in next(line for line in lines if line.split()[:1] == ["run"])


@pytest.mark.parametrize(
    ("module", "overrides", "message"),
    [
        ("foundry.sample", [], "run: has no value; give it as run=..."),
        ("foundry.export", ["run=nowhere", "out=new"], "run: nowhere is not a run directory: it has no config.yaml"),
        ("foundry.sample", ["rum=x", "run=y"], "rum: is not an option; did you mean run?"),
    ],
)
def test_config_error_of_a_command_exits_with_2_and_one_line(run_command, module, overrides, message):
    stdout, stderr = run_command(*overrides, module=module, code=2)
    assert stdout == ""
    assert stderr.startswith(message)
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "unbuffered", "code"), [(os.pipe, "", 0), (os.pipe, "1", 141), (pty.openpty, "", 0)]
)
def test_closed_output_pipe_gives_no_traceback(output, unbuffered, code):
    """Without special handling, Python exits with 120 or prints a traceback."""
    reader, writer = output()
    os.close(reader)
    command = [sys.executable, "-m", "foundry", "--version"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (code, b"")
