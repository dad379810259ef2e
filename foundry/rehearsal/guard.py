"""Device guard for fake CUDA tensors in a torch without CUDA: built on demand, loaded before torch.

A CUDA build of torch includes a guard, and needs no compiler.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device_guard.cpp")


class GuardError(RuntimeError):
    """Raised if the guard cannot be built or loaded. The message is one line that contains the remedy."""


def reason_not_to_load() -> str | None:
    """Return the reason why this machine cannot have fake CUDA devices, or None. Does not import torch."""
    if _has_own_guard() or _library_path().exists() or shutil.which("g++"):
        return None
    return "g++ is required to build the device guard for a torch without CUDA; install it (Debian: apt install g++)"


def load_guard() -> None:
    """Add a fake CUDA device to this process, and hide real ones from it.

    Call this function before anything imports torch, which queries its devices once. This function imports torch.

    Raises:
        GuardError: if there is no compiler, the compilation fails, or torch is already imported.
    """
    if "torch" in sys.modules:
        raise GuardError("torch has been imported before the device guard; start a new process")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not _has_own_guard():
        ctypes.CDLL(str(build_guard()))
    import torch

    if _has_own_guard():
        torch._C._ensureCUDADeviceGuardSet()


def build_guard() -> Path:
    """Return the path of the guard's shared library for the installed torch; compile it unless the user's cache has it.

    Raises:
        GuardError: if there is no compiler, or it fails.
    """
    path = _library_path()
    if path.exists() and path.stat().st_uid == os.getuid():
        return path
    if reason := reason_not_to_load():
        raise GuardError(reason)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=path.parent)
    except OSError:  # no home directory, or a read-only one
        folder = tempfile.mkdtemp(prefix="foundry-guard-")
        path = Path(folder) / path.name
    output, torch_folder = Path(folder) / "compiled.so", _torch_folder()
    options = ["-O0", "-w", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    command = ["g++", *options, str(SOURCE), *libraries, "-o", str(output)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        first = next((line for line in process.stderr.splitlines() if "error" in line), process.stderr.strip()[:200])
        raise GuardError(f"g++ cannot build the device guard for torch {version('torch')}: {first}")
    output.replace(path)  # atomic, since another process may be building it too
    if path.parent != Path(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _library_path() -> Path:
    """Return the path of the library for this source and this torch."""
    key = f"{version('torch')} {_torch_folder()}".encode() + SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "foundry" / f"device_guard-{hashlib.sha256(key).hexdigest()[:16]}.so"


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    return Path(str(spec.origin)).parent


def _has_own_guard() -> bool:
    return (_torch_folder() / "lib" / "libtorch_cuda.so").exists()
