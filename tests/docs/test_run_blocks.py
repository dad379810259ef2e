"""docs/run_blocks.py runs the bash blocks of the pages in the environments that they require."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.scripts import ROOT, load_script
from support.tiny import TINY_LM
from support.warm_python import WarmPython

PAGE = """
```bash
echo everywhere
```

<!-- run: slurm -->
```bash
echo cluster
```

<!-- run: elsewhere -->

```bash
echo elsewhere
```

```text
echo never
```
"""


@pytest.fixture(scope="module")
def script():
    return load_script("run_blocks")


def test_run_comment_selects_where_a_block_runs(script):
    assert script.blocks(PAGE) == ["echo everywhere\n"]
    assert script.blocks(PAGE, at="slurm") == ["echo everywhere\n", "echo cluster\n"]
    with pytest.raises(ValueError, match="slrum --> is not a place; choose from slurm, ci, elsewhere"):
        script.blocks(PAGE.replace("slurm", "slrum"))


def test_ci_extracts_the_two_commands_of_the_readme():
    first, second = (
        subprocess.run([ROOT / ".ci" / "readme", number], capture_output=True, text=True, check=True).stdout
        for number in "12"
    )
    assert first.rstrip().endswith("python -m foundry")
    assert second.rstrip().endswith("pytest")
    assert all(f"\n```bash\n{command}```\n" in (ROOT / "README.md").read_text() for command in (first, second))
    assert subprocess.run([ROOT / ".ci" / "readme", "3"], capture_output=True, check=False).returncode == 1


def test_failed_block_reports_exit_code_and_output(script, tmp_path):
    assert script._run_block("echo $PLACE; test $PLACE = here", tmp_path, {**os.environ, "PLACE": "here"}) is None
    error = script._run_block("echo before; false; echo after", tmp_path, os.environ)
    assert error == "exit code 1\nbefore\n"


def test_background_processes_of_a_block_are_killed(script, tmp_path):
    began = time.monotonic()
    assert script._run_block("sleep 30 & echo $! > pid", tmp_path, os.environ) is None
    assert time.monotonic() - began < 25
    process = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    deadline = time.monotonic() + 60
    while process.exists() and process.read_bytes():  # empty for a zombie process
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_bash_block_has_a_known_place(script):
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        here = len(script.blocks(text))
        elsewhere = sum(len(script.blocks(text, at=place)) - here for place in script.PLACES)
        assert here + elsewhere == text.count("\n```bash\n")


@pytest.fixture
def shell(tmp_path, cache):
    """Return `shell(code)`, which starts bash in the folder of the test with `WarmPython` first on PATH."""
    with WarmPython() as python:
        path = os.pathsep.join([str(python.folder), os.environ["PATH"]])
        environment = {**os.environ, "FOUNDRY_CACHE": str(cache), "PATH": path}

        def start(code):
            return subprocess.Popen(
                ["bash", "-c", code],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

        yield start


def test_first_command_starts_cold_and_the_others_fork(shell):
    cold, warm = (shell("PYTHONVERBOSE=1 python -m foundry --version").communicate() for _ in range(2))
    assert cold[0] == warm[0] != ""
    assert "import 'foundry.commands.main'" in cold[1]
    assert warm[1] == ""
    refused = shell("python -m foundry hparams.lr=-1")
    assert refused.communicate()[1].startswith("hparams.lr: ")
    assert refused.returncode == 2
    assert shell("python -c 'print(7)'").communicate()[0] == "7\n"


@pytest.mark.long
def test_forked_command_gets_signals_and_ends_with_its_shell(shell, tmp_path):
    shell("python -m foundry --version").communicate()
    run = (
        f"python -m foundry {' '.join(TINY_LM)} hparams.max_steps=100000 tracking.log_every_n_steps=1 hydra.run.dir=run"
    )
    metrics = tmp_path / "run" / "metrics.jsonl"

    def wait_for(condition):
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    stopped = shell(
        f"{run} & child=$!; until [ -s run/metrics.jsonl ]; do sleep 0.1; done; kill -TERM $child; wait $child"
    )
    stopped.communicate(timeout=240)
    assert stopped.returncode == 128 + signal.SIGTERM

    size = metrics.stat().st_size
    killed = shell(run)
    wait_for(lambda: metrics.stat().st_size > size)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    wait_for(lambda: not any(folder_of(process) == tmp_path for process in Path("/proc").glob("[0-9]*")))


def folder_of(process):
    try:
        return (process / "cwd").readlink()
    except OSError:
        return None
