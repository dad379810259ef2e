import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import submitit
from submitit.core.job_environment import SignalHandler as SubmititsHandler

from foundry.core.stopped import Stopped
from foundry.training.signals import Boundary, SignalHandler

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Submitit:
    """Has the names of submitit's SignalHandler, and remembers who called."""

    def __init__(self):
        self.calls = []

    def checkpoint_and_try_requeue(self, signum, frame):
        self.calls.append(signum)
        subprocess.check_call(["sh", "-c", "kill -TERM $$; kill -USR2 $$"])  # `scontrol requeue`, signalled as well
        sys.exit(-1)

    def bypass(self, signum, frame):
        self.calls.append(signum)


@pytest.fixture
def install():
    """Put handlers in place as a launcher does, and take them away again."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield lambda handlers: [signal.signal(*item) for item in handlers.items()]
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def _not_a_slurm_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_noted_and_the_handlers_from_before_come_back(signum):
    before = [signal.getsignal(number) for number in SIGNALS]
    with SignalHandler() as signals:
        assert signals.requested is None
        assert signals.flags == 0
        os.kill(os.getpid(), signum)
        assert signals.requested is signum
        assert signals.flags.signum is signum
        assert signals.state_after(signum) == "stopped"
        assert signals.hand_over(signum, is_main=True) is False
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nohup_is_respected(install):
    install({signal.SIGHUP: signal.SIG_IGN})
    with SignalHandler() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.requested is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_the_first_signal_counts():
    with SignalHandler() as signals:
        for signum in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signum)
        assert signals.requested is signal.SIGUSR2


def test_a_second_copy_does_not_kill_a_run_that_has_stopped(install):
    """A scheduler signals every process, and a launcher passes its own on: the run may be through by then."""
    install({signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler})

    def stop():
        with SignalHandler() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            raise Stopped(signals.requested, 7, None, "stopped")

    with pytest.raises(Stopped):
        stop()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="broken"), SignalHandler():
        raise ValueError("broken")
    assert signal.getsignal(signal.SIGTERM) is before


def test_of_several_ranks_signals_the_one_that_may_requeue_counts():
    assert Boundary.SAVE.signum is None
    assert (Boundary.STOP_INT | Boundary.STOP_TERM).signum is signal.SIGTERM
    assert Boundary(int(Boundary.STOP_TERM | Boundary.STOP_USR2 | Boundary.SAVE)).signum is signal.SIGUSR2


TRAIN = """
import atexit, sys, time
from foundry.training.signals import SignalHandler
atexit.register(lambda: sys.stdout.write("left in order"))
with SignalHandler():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    time.sleep(30)
"""


def test_a_second_ctrl_c_ends_the_process_at_once():
    process = subprocess.Popen([sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, "", "")


def test_outside_the_main_thread_it_says_that_it_can_do_nothing(caplog):
    before = [signal.getsignal(number) for number in SIGNALS]
    states = []

    def work():
        with SignalHandler() as signals:
            states.append((signals.requested, [signal.getsignal(number) for number in SIGNALS]))
            states.append(signals.hand_over(signal.SIGUSR2, is_main=True))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert states == [(None, before), False]
    assert caplog.messages == [
        "not in the main thread: signals will not be noticed, and end the run without a checkpoint"
    ]


def test_submitits_handler_is_called_once_and_by_rank_zero(install):
    launcher = Submitit()
    install({signal.SIGUSR2: launcher.checkpoint_and_try_requeue, signal.SIGTERM: launcher.bypass})
    with SignalHandler() as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert launcher.calls == []
        assert signals.state_after(signal.SIGUSR2) == "requeued"
        with pytest.raises(SystemExit) as left:
            signals.hand_over(signal.SIGUSR2, is_main=True)
    assert left.value.code == -1
    assert launcher.calls == [signal.SIGUSR2]
    for signum in (signal.SIGUSR2, signal.SIGTERM):  # a second copy, and the one that a requeue brings
        os.kill(os.getpid(), signum)
    assert launcher.calls == [signal.SIGUSR2]


def test_what_submitit_ignores_is_not_handed_over(install):
    launcher = Submitit()
    install({signal.SIGTERM: launcher.bypass})
    with SignalHandler() as signals:
        assert signals.state_after(signal.SIGTERM) == "stopped"
        assert signals.hand_over(signal.SIGTERM, is_main=True) is False
    assert launcher.calls == []


def test_submitit_still_has_these_names():
    assert callable(SubmititsHandler.checkpoint_and_try_requeue)
    assert callable(SubmititsHandler.bypass)


PARK = """
import signal, sys, time
from foundry.training.signals import SignalHandler
class Submitit:
    def checkpoint_and_try_requeue(self, signum, frame):
        sys.stdout.write("called")
signal.signal(signal.SIGUSR2, Submitit().checkpoint_and_try_requeue)
with SignalHandler() as signals:
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    signals.hand_over(signal.SIGUSR2, is_main=False)
"""


def test_other_ranks_leave_where_submitit_waits_for_them(install, monkeypatch):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SUBMITIT_LOCAL_GLOBALID", "1")
    launcher = Submitit()
    install({signal.SIGUSR2: launcher.checkpoint_and_try_requeue})
    with SignalHandler() as signals:
        assert signals.hand_over(signal.SIGUSR2, is_main=False) is True
    assert launcher.calls == []


def test_other_ranks_wait_until_slurm_ends_them():
    process = subprocess.Popen([sys.executable, "-c", PARK], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (-signal.SIGTERM, "")


# What Slurm 22.05 says of a job that has just got SIGTERM.
CANCELLED = "JobId=1 JobState=COMPLETING Requeue=1 Restarts=0 PreemptTime=None Command=a b=c"
REQUEUED = "JobId=2 JobState=COMPLETING Requeue=1 Restarts=1"
REQUEUED_AGAIN = "JobId=2 JobState=COMPLETING Requeue=1 Restarts=2"
IN_GRACE_TIME = "JobId=3 JobState=RUNNING Requeue=1 Restarts=0 PreemptTime=2026-11-21T19:57:16"
NOT_TO_BE_REQUEUED = "JobId=3 JobState=RUNNING Requeue=0 Restarts=0 PreemptTime=2026-11-21T19:57:16"


@pytest.mark.parametrize(
    ("message", "restarts", "state"),
    [
        (CANCELLED, None, "stopped"),
        (REQUEUED, None, "requeued"),
        (REQUEUED, "1", "stopped"),
        (REQUEUED_AGAIN, "1", "requeued"),
        (IN_GRACE_TIME, None, "requeued"),
        (NOT_TO_BE_REQUEUED, None, "stopped"),
        (None, None, "stopped"),
    ],
)
def test_whether_slurm_requeues_after_sigterm(tmp_path, monkeypatch, message, restarts, state):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '{message}'\n" if message else "#!/bin/sh\necho unreachable >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert SignalHandler().state_after(signal.SIGTERM) == state
    assert SignalHandler().state_after(signal.SIGINT) == "stopped"


class Training:
    """A job of submitit that counts to five over two attempts; what it has saved is in a file."""

    def __call__(self, path):
        with SignalHandler() as signals:
            while (step := int(path.read_text())) < 5:
                path.write_text(str(step + 1))
                if step + 1 == 3:
                    os.kill(os.getpid(), signal.SIGUSR2)
                if signals.requested is not None:
                    signals.hand_over(signals.requested, is_main=True)
                time.sleep(0.01)
        return os.getpid(), step

    def checkpoint(self, path):
        return submitit.helpers.DelayedSubmission(self, path)


def test_submitit_starts_the_job_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    path = tmp_path / "step"
    path.write_text("0")
    job = submitit.LocalExecutor(tmp_path / "jobs").submit(Training(), path)
    _, step = job.result()
    assert step == 5
    assert "Requeued job" in job.stdout()
