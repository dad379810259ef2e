"""Tags that identify the code, command and machine of a run."""

import getpass
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import foundry
from foundry.run_dir.redact import masked_text


def provenance(directory: Path) -> dict[str, str]:
    """Return tags that identify the code, the command, the machine and the user. Unknown values are left out.

    Args:
        directory: folder that the program was started in. If it is not in a git repository, foundry's repository is
            used.
    """
    program = Path(sys.argv[0])
    tags = {
        "foundry_version": foundry.__version__,
        "host": socket.gethostname(),
        "command": masked_text(shlex.join(sys.orig_argv)),
        "mlflow.source.name": program.parent.name if program.name == "__main__.py" else program.name,
        "mlflow.source.type": "LOCAL",
    }
    with suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    for folder in (directory, Path(foundry.__file__).parent):
        if commit := _git(folder, "rev-parse", "HEAD"):
            dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
            tags |= {"git_commit": commit, "git_dirty": str(dirty).lower(), "mlflow.source.git.commit": commit}
            break
    return tags


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
