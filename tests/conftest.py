import gc
import os
import signal
from pathlib import Path

import pytest
from support.composition import CHOICES, share_compositions
from support.drawing import reason_not_to_draw
from support.examples import selection
from support.run_once import RunOnce
from support.terminal import Shell
from support.unsynced import skip_fsync
from support.warm import WarmShell

for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        # Background jobs and nohup ignore these signals; processes that the tests start would inherit that.
        signal.signal(_signum, _handler)

# One thread per process: the suite starts many processes, and results must not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
skip_fsync()


def pytest_configure(config):
    selection.is_all = config.option.markexpr != "not long"
    if record := os.environ.get("FOUNDRY_TESTS_RAN"):
        config.pluginmanager.register(RunOnce(Path(record)))


class _Backwards(pytest.Dir):
    """Folder with reversed collection order."""

    def collect(self):
        return reversed(list(super().collect()))


def pytest_collect_directory(path, parent):
    """Reverse the order in the second test process: each process reuses the modules that the other has compiled."""
    is_second = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
    return _Backwards.from_parent(parent, path=path) if is_second else None


def pytest_collection_modifyitems(items):
    """Run the slowest folders first, so that no test process waits long for the last file of another process."""
    rooms = {name: place for place, name in enumerate(("slurm", "e2e", "parity", "distributed", "launch"))}
    items.sort(key=lambda item: (rooms.get(item.path.parent.name, len(rooms)), str(item.path)))


def pytest_collection_finish():
    """Exclude modules and tests from garbage collection and collect less often: `tests/config` takes 10% less time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("egl") is not None and (reason := reason_not_to_draw()):
        pytest.skip(f"needs EGL: {reason}")


@pytest.fixture(autouse=True)
def kept_choices():
    """Share one cache of foundry's option files between the compositions of all tests."""
    with CHOICES.used():
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory, worker_id):
    """Cache folder shared by all test processes, so that a tokenizer is trained once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def shared_compositions(cache):
    """Share the compositions of all test processes, so that the same options are read and merged once."""
    cache.with_name("compositions").mkdir(exist_ok=True)
    share_compositions(cache)


@pytest.fixture
def shell(tmp_path, cache):
    """Run commands in the folder of the test, in forked processes."""
    return WarmShell(tmp_path, cache)


@pytest.fixture
def run_command(tmp_path, cache):
    """Run commands in the folder of the test, within this process; not for commands with child processes or signals."""
    from support.in_process import Commands

    return Commands(tmp_path, cache)


@pytest.fixture
def cold_shell(tmp_path, cache):
    """Run commands in new Python processes, for tests of the process start."""
    return Shell(tmp_path, cache)
