import errno
import fcntl
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from foundry.run_dir.lock import LOCK, RunDirectoryLostError, check_locked, is_held, lock

LOOK = "import sys, pathlib, foundry.run_dir.lock as it; print(it.is_held(pathlib.Path(sys.argv[1])))"

HOLD = """
import contextlib, pathlib, sys, foundry.run_dir.lock as it
with contextlib.ExitStack() as stack:
    print(it.lock(pathlib.Path(sys.argv[1]), stack), flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another_process(run_dir):
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        yield


def seen_by_another_process(run_dir):
    process = subprocess.run([sys.executable, "-c", LOOK, str(run_dir)], capture_output=True, text=True, check=True)
    return process.stdout.strip()


def test_is_held_reports_acquisition_and_release_to_other_processes(tmp_path):
    run_dir = tmp_path / "run"
    assert seen_by_another_process(run_dir) == "None"
    with ExitStack() as stack:
        assert lock(run_dir, stack)
        assert is_held(run_dir) is True
        assert not lock(run_dir, stack)
        assert seen_by_another_process(run_dir) == "True"
        assert seen_by_another_process(run_dir) == "True"  # is_held does not release the lock
    assert seen_by_another_process(run_dir) == "False"


def test_lock_fails_while_another_process_holds_it(tmp_path):
    with held_by_another_process(tmp_path):
        assert is_held(tmp_path) is True
        with ExitStack() as stack:
            assert not lock(tmp_path, stack)
        assert is_held(tmp_path) is True
    with ExitStack() as stack:
        assert lock(tmp_path, stack)


def test_is_held_is_unknown_for_a_free_lock_of_another_machine(tmp_path):
    with held_by_another_process(tmp_path):
        (tmp_path / LOCK).write_text("elsewhere")
        assert is_held(tmp_path) is True
    assert is_held(tmp_path) is None


def moved(run_dir):
    return run_dir.rename(run_dir.with_name("moved"))


def made_anew(run_dir):
    shutil.rmtree(run_dir)
    run_dir.mkdir()


def replaced_by_another_run(run_dir):
    made_anew(run_dir)
    (run_dir / LOCK).write_text("elsewhere")


def replaced_by_a_file(run_dir):
    shutil.rmtree(run_dir)
    run_dir.write_text("a file")


def replaced_by_a_link(run_dir):
    moved(run_dir)
    run_dir.symlink_to(run_dir.parent)


LOST = [shutil.rmtree, moved, made_anew, replaced_by_another_run, replaced_by_a_file, replaced_by_a_link]


@pytest.mark.parametrize("lose", LOST)
def test_check_locked_detects_a_lost_run_directory(tmp_path, lose):
    run_dir = tmp_path / "run"
    with ExitStack() as stack:
        assert lock(run_dir, stack)
        check_locked(run_dir)
        lose(run_dir)
        with pytest.raises(RunDirectoryLostError, match=f"^{run_dir} was deleted, moved or replaced"):
            check_locked(run_dir)


def test_check_locked_accepts_a_moved_and_linked_run_directory(tmp_path):
    run_dir = tmp_path / "run"
    with ExitStack() as stack:
        assert lock(run_dir, stack)
        run_dir.symlink_to(moved(run_dir))
        check_locked(run_dir)


def test_check_locked_works_without_file_system_locks(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with ExitStack() as stack:
        assert lock(tmp_path, stack)
        check_locked(tmp_path)
        (tmp_path / LOCK).unlink()
        with pytest.raises(RunDirectoryLostError):
            check_locked(tmp_path)
