"""Run the ```bash blocks of the README and of the pages in docs: `python docs/run_blocks.py [FILE ...]`.

Each document runs from top to bottom in its own copy of the checkout. A new bash runs each block and stops at the first
error; `python` is the interpreter of this script. The first foundry command of each document and the first of each
module start as in a terminal; all other foundry commands fork from a process that has imported the modules. A comment
above a block excludes it: `<!-- run: slurm -->` needs a Slurm cluster, tests/slurm/test_slurm_docs.py runs it;
`<!-- run: ci -->` is a command of the README that `.ci/run` runs; `<!-- run: elsewhere -->` needs resources that no
test has.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from support.warm_python import WarmPython  # noqa: E402 (beside the tests)

PLACES = ("slurm", "ci", "elsewhere")
LIMIT_SECONDS = 300.0
_BLOCK = re.compile(r"(?P<before>[^\n]*)\n+```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"<!-- run: (\w+) -->")
_NOT_COPIED = shutil.ignore_patterns(
    ".git",
    ".venv",
    ".*cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "runs",
    "outputs",
    "build",
    "mlflow.db",
    "mlruns",
    "multirun",
)


def blocks(text: str, *, at: str | None = None) -> list[str]:
    """Return the code of the bash blocks without a `run:` comment and of those whose comment names `at`.

    Raises:
        ValueError: the comment of a block names a place that is not in `PLACES`.
    """
    chosen = []
    for match in _BLOCK.finditer(text):
        place = _PLACE.fullmatch(match["before"].strip())
        if place is not None and place[1] not in PLACES:
            raise ValueError(f"{place[0]} is not a place; choose from {', '.join(PLACES)}")
        if place is None or place[1] == at:
            chosen.append(match["code"])
    return chosen


def documents() -> Iterator[Path]:
    """Yield the README and the pages of docs that have a block to run."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if blocks(path.read_text(encoding="utf-8")):
            yield path


def run(path: Path, *, at: str | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Run a document's blocks in a new copy of the checkout; print each time, and return False after a failed block."""
    with (
        tempfile.TemporaryDirectory(prefix="foundry-docs-", ignore_cleanup_errors=True) as folder,
        WarmPython() if at is None else nullcontext() as python,  # jobs of a cluster have another environment
    ):
        copy = Path(folder) / "foundry"
        shutil.copytree(ROOT, copy, ignore=_NOT_COPIED)
        for number, code in enumerate(blocks(path.read_text(encoding="utf-8"), at=at), start=1):
            began = time.monotonic()
            error = _run_block(code, copy, environment, python and python.folder)
            message = f"{path.relative_to(ROOT)} block {number}: {time.monotonic() - began:.1f} s"
            if error is not None:
                sys.stdout.write(f"{message}: FAILED\n{code}\n{error}\n")
                return False
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()
    return True


def _run_block(code: str, directory: Path, environment: Mapping[str, str], programs: Path | None = None) -> str | None:
    """Run a block and kill its remaining processes; return None, or the error. `programs` is first on PATH."""
    cache = str(Path(tempfile.gettempdir()) / "foundry-docs-cache")
    folders = [*filter(None, [programs]), Path(sys.executable).parent, environment["PATH"]]
    with tempfile.TemporaryFile("w+") as message:
        bash = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=directory,
            env={
                "FOUNDRY_CACHE": cache,
                "OMP_NUM_THREADS": "1",
                **environment,
                "PATH": os.pathsep.join(map(str, folders)),
            },  # one thread, since other programs run at the same time
            stdout=message,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code_of_exit = bash.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"took longer than {LIMIT_SECONDS:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)
            bash.wait()
        message.seek(0)
        return None if code_of_exit == 0 else f"exit code {code_of_exit}\n{message.read()[-4000:]}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the process that commands fork from
    chosen = [Path(word).resolve() for word in sys.argv[1:]] or list(documents())
    failed = [path for path in chosen if not run(path)]
    sys.exit(1 if failed else 0)
