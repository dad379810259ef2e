import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from foundry.core.exit_codes import ExitCode
from foundry.parallel.watchdog import CollectiveError, Watchdog, translate

STALL = """
import time
from foundry.parallel.watchdog import Watchdog
with Watchdog(0.6, rank=3) as watchdog:
    for step in range(4):
        watchdog.heartbeat(step, "reducing gradients")
        time.sleep(0.3)
    time.sleep(60)
"""


def test_watchdog_ends_a_stalled_process_and_names_its_activity():
    done = subprocess.run([sys.executable, "-c", STALL], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == ExitCode.STALLED
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(
        "rank 3 has made no progress for 1 s (distributed.timeout_seconds=0.6), at step 3, reducing gradients"
    )


ALIVE = """
import time
from foundry.parallel.watchdog import Watchdog
with Watchdog(1.2, rank=0) as watchdog:
    watchdog.heartbeat(3, "saving a checkpoint")
    for _ in range(12):
        time.sleep(0.2)
        watchdog.alive()
    print("saved", flush=True)
    time.sleep(60)
"""


@pytest.mark.long
def test_watchdog_spares_slow_work_that_reports_progress():
    done = subprocess.run([sys.executable, "-c", ALIVE], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == ("saved\n", ExitCode.STALLED)
    assert "at step 3, saving a checkpoint" in done.stderr


COMPILING = """
import time
from foundry.parallel.watchdog import Watchdog
done = []
with Watchdog(0.6, rank=0, start_timeout_seconds={start}, when_started=lambda: done.append("started")) as watchdog:
    watchdog.heartbeat(1, "training")
    time.sleep(1.5)
    for step in (2, 3):
        watchdog.started()
        watchdog.heartbeat(step, "training")
    print(*done, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("start", "said", "setting"),
    [pytest.param(30, "started\n", "timeout", marks=pytest.mark.long), (0.3, "", "start_timeout")],
)
def test_watchdog_limit_of_the_first_step_is_start_timeout(start, said, setting):
    code = COMPILING.format(start=start)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == (said, ExitCode.STALLED)
    step, limit = (3, 0.6) if said else (1, 0.3)
    assert f"(distributed.{setting}_seconds={limit}), at step {step}, training" in done.stderr


SLEEPER = """
import time
from foundry.parallel import watchdog

class Clock:  # jumps by an hour, as while the process is stopped or the machine sleeps
    def __init__(self):
        self.begin = time.monotonic()
    def monotonic(self):
        now = time.monotonic()
        return now + 3600 * (now - self.begin > 0.5)

watchdog.time = Clock()
with watchdog.Watchdog(3.0, rank=0) as dog:
    dog.heartbeat(1, "training")
    time.sleep(1.5)
    dog.heartbeat(2, "training")
    {then}
"""


@pytest.mark.long
def test_watchdog_ignores_a_jump_of_the_clock():
    code = SLEEPER.format(then="pass")
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    code = SLEEPER.format(then="time.sleep(60)")  # The watchdog still detects a stall.
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == ExitCode.STALLED


STOPPED = """
import time
from foundry.parallel.watchdog import Watchdog
with Watchdog(6.0, rank=0) as dog:
    dog.heartbeat(1, "training")
    print("begun", flush=True)
    end = time.process_time() + 1.5
    while time.process_time() < end:  # work that being stopped leaves undone
        pass
"""


@pytest.mark.long
def test_watchdog_spares_a_process_that_was_stopped_and_continued():
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(8)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0


@pytest.mark.long
def test_watchdog_records_the_stack_and_does_not_wait_for_the_disk(tmp_path):
    code = """
import sys, time
from foundry.parallel.watchdog import Watchdog
def record(rank, line, stack):
    sys.stdout.write(f"{rank}|{line}|{stack}")
    sys.stdout.flush()
    time.sleep(600)
def read_a_slow_file():
    time.sleep(600)
import foundry.parallel.watchdog as module
module._RECORDING_SECONDS = 0.2
with Watchdog(0.3, rank=2, record=record) as dog:
    dog.heartbeat(7, "reading samples")
    read_a_slow_file()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == ExitCode.STALLED
    rank, line, stack = done.stdout.split("|")
    assert rank == "2"
    assert "at step 7, reading samples" in line
    assert "in read_a_slow_file" in stack


@pytest.mark.parametrize(
    ("world_size", "dumps", "blamed", "message"),
    [
        (3, {2: (5, "training")}, 1, "rank 1 gave no sign of life (stopped, busy, or unreachable); rank 0 waited for"),
        (4, {2: (5, "training")}, 1, "ranks 1, 3 gave no sign of life"),
        (3, {1: (4, "reading samples"), 2: (5, "training")}, 1, "; rank 1 is at step 4, reading samples: ended"),
        (2, {1: (5, "reading samples")}, 0, "; rank 1 is at step 5, reading samples: ended"),
        (2, {1: (5, "training")}, 0, "rank 0 has made no progress for 9 s"),
        (2, None, 0, "rank 0 has made no progress for 9 s"),
    ],
)
def test_watchdog_blames_the_missing_rank_and_not_a_waiting_one(world_size, dumps, blamed, message):
    dumps = None if dumps is None else {0: (5, "training"), **dumps}
    rank, line = Watchdog(9.0, rank=0, world_size=world_size)._verdict(9.0, 5, "training", dumps)
    assert rank == blamed
    assert message in line
    assert "\n" not in line


TWO = """
import sys, time
from pathlib import Path
from functools import partial
from foundry.parallel.watchdog import Watchdog
from foundry.run_dir.ends import dump_stacks, read_positions
folder, rank, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
read_dumps = partial(read_positions, folder, rank, 2, 1.0)
dog = Watchdog(2.0, rank, world_size=2, dump=partial(dump_stacks, folder, rank), read_dumps=read_dumps)
with dog:
    for _ in range(int(seconds * 20)):
        dog.heartbeat(3, "reading samples")
        time.sleep(0.05)
    assert not dog.silent_ranks_message
    dog.heartbeat(4, "training")
    time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("other", "says"), [(0.0, "rank 0 has made no progress for"), (60.0, "rank 1 gave no sign of life")]
)
def test_watchdog_names_the_rank_that_does_not_reach_the_collective(tmp_path, other, says):
    commands = [[sys.executable, "-c", TWO, tmp_path, str(rank), str(busy)] for rank, busy in enumerate((0.0, other))]
    with subprocess.Popen(commands[1]) as second:
        first = subprocess.run(commands[0], capture_output=True, text=True, timeout=50, check=False)
        second.kill()
    assert first.stderr.startswith(says)


def test_leaving_the_context_stops_the_watchdog():
    with Watchdog(0.2, rank=0) as watchdog:
        watchdog.heartbeat(1, "evaluating")
    time.sleep(0.4)  # A running watchdog would end this process.
    assert not watchdog._thread.is_alive()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:5871"), "another rank has ended"),
        (RuntimeError("[gloo/x.cc:81] Timed out waiting 2000ms for recv operation"), "did not join in time"),
        (dist.DistBackendError("NCCL error: remote process exited"), "another rank has ended"),
        (dist.DistStoreError("wait timeout after 300000ms, keys: /0"), "did not join in time"),
    ],
)
def test_collective_errors_are_translated_to_one_line(error, cause):
    translated = translate(error, rank=1, step=7, activity="reducing gradients")
    assert isinstance(translated, CollectiveError)
    assert str(translated).startswith("rank 1, step 7, reducing gradients: ")
    assert cause in str(translated)
    assert "\n" not in str(translated)


def test_other_errors_are_not_translated():
    assert translate(RuntimeError("shapes do not match"), rank=0, step=0, activity="forward") is None
    assert translate(ValueError("Timed out waiting"), rank=0, step=0, activity="forward") is None


def test_watchdog_now_reports_an_activity_of_the_same_step():
    beats = []
    watchdog = Watchdog(60.0, 0, on_heartbeat=lambda *at: beats.append(at))
    watchdog.heartbeat(7, "reading samples")
    watchdog.now("generating answers")
    assert beats == [(7, "reading samples"), (7, "generating answers")]
