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

from foundry.core.stop_signals import Stopped
from foundry.training import signals as signals_module
from foundry.training.signals import Boundary, SignalHandler

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Submitit:
    """Imitates submitit's SignalHandler and records its calls."""

    def __init__(self):
        self.calls = []

    def checkpoint_and_try_requeue(self, signum, frame):
        self.calls.append(signum)
        subprocess.check_call(["sh", "-c", "kill -TERM $$; kill -USR2 $$"])  # like a signaled `scontrol requeue`
        sys.exit(-1)

    def bypass(self, signum, frame):
        self.calls.append(signum)


@pytest.fixture
def install():
    """Return a function that installs signal handlers like a launcher; restore the previous ones afterwards."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield lambda handlers: [signal.signal(*item) for item in handlers.items()]
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def _not_a_slurm_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_is_recorded_and_previous_handlers_are_restored(signum):
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


def test_ignored_sighup_of_nohup_stays_ignored(install):
    install({signal.SIGHUP: signal.SIG_IGN})
    with SignalHandler() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.requested is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_first_of_several_signals_is_kept():
    with SignalHandler() as signals:
        for signum in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signum)
        assert signals.requested is signal.SIGUSR2


def test_repeated_sigterm_does_not_kill_a_stopped_run(install):
    """Schedulers signal every process and launchers forward signals, possibly after the run has stopped."""
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


def test_signal_handlers_are_restored_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="broken"), SignalHandler():
        raise ValueError("broken")
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_that_may_requeue_takes_precedence_among_ranks():
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


def test_second_ctrl_c_ends_the_process_at_once():
    process = subprocess.Popen([sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, "", "")


def test_signal_handler_outside_the_main_thread_warns(caplog):
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
    assert caplog.messages == ["not in the main thread: signals end the run without a checkpoint"]


def test_submitit_handler_is_called_once_by_rank_0(install):
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
    for signum in (signal.SIGUSR2, signal.SIGTERM):  # A repeated signal, and the one sent by a requeue.
        os.kill(os.getpid(), signum)
    assert launcher.calls == [signal.SIGUSR2]


def test_signal_ignored_by_submitit_is_not_handed_over(install):
    launcher = Submitit()
    install({signal.SIGTERM: launcher.bypass})
    with SignalHandler() as signals:
        assert signals.state_after(signal.SIGTERM) == "stopped"
        assert signals.hand_over(signal.SIGTERM, is_main=True) is False
    assert launcher.calls == []


def test_submitit_handler_names_still_exist():
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


def test_other_ranks_exit_under_the_local_submitit_executor(install, monkeypatch):
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


RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
NODES = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "waits"),
    [
        ({**RANK, **TORCHRUN}, []),
        ({**RANK, "FOUNDRY_STORE": ""}, []),
        ({**RANK, **NODES, **TORCHRUN}, [5.0]),  # srun may end the agent of rank 0 after the other agent
        (RANK, [5.0]),  # set by a script under srun
        (STEP, [5.0]),
    ],
)
def test_other_ranks_wait_after_sigterm_only_if_their_exit_would_end_rank_0(monkeypatch, install, variables, waits):
    install({signal.SIGTERM: signal.SIG_DFL})
    for name, value in {"SLURM_JOB_ID": "3", **variables}.items():
        monkeypatch.setenv(name, value)
    seconds = []
    monkeypatch.setattr(signals_module.time, "sleep", seconds.append)
    with SignalHandler() as signals:
        assert signals.hand_over(signal.SIGTERM, is_main=False) is False
    assert seconds == waits


# Output of Slurm 22.05 for a job right after SIGTERM.
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
def test_state_after_sigterm_follows_the_requeue_of_slurm(tmp_path, monkeypatch, message, restarts, state):
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
    """A submitit job that counts to five over two attempts, with its progress in a file."""

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


def test_submitit_restarts_the_job_after_hand_over(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    path = tmp_path / "step"
    path.write_text("0")
    job = submitit.LocalExecutor(tmp_path / "jobs").submit(Training(), path)
    _, step = job.result()
    assert step == 5
    assert "Requeued job" in job.stdout()
