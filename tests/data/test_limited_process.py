import os
import signal
import time
from pathlib import Path

import pytest

from foundry.core.errors import ConfigError, Violation
from foundry.data.io.limited_process import LimitedProcess, LimitExceededError, is_limited, renew_limit


@pytest.fixture
def limited():
    made = []

    def make(function, cpu_seconds=0.2):
        made.append(LimitedProcess(function, cpu_seconds=cpu_seconds, memory_bytes=2**28))
        return made[-1]

    yield make
    for process in made:
        process.close()


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


def fail(error):
    raise error


def test_calls_share_one_child_process(limited):
    process = limited(lambda *args, **options: (os.getpid(), is_limited(), args, options))
    first, second = process.call(1, name="a"), process.call(2)
    assert first[0] == second[0] != os.getpid()
    assert first[1:] == (True, (1,), {"name": "a"})
    assert not is_limited()


def test_exception_is_reraised_and_the_child_process_survives(limited):
    process = limited(fail)
    for error in (ValueError("no"), KeyError("a"), RecursionError("deep")):
        with pytest.raises(type(error), match=str(error.args[0])):
            process.call(error)


def test_config_error_with_two_violations_keeps_both(limited):
    violations = (Violation("a.b", "is 1"), Violation("c", "is 2"))
    with pytest.raises(ConfigError, match=r"^a\.b: is 1\nc: is 2$") as refused:
        limited(fail).call(ConfigError(violations))
    assert refused.value.violations == violations


@pytest.mark.parametrize("function", [lambda: spin(60), lambda: 9**9**9 if os.getpid() else 0])
def test_call_over_the_cpu_limit_is_reported_and_the_next_call_succeeds(limited, function):
    check_named(limited(lambda harmless: "answer" if harmless else function()), r"takes more than 0\.2 s")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: bytes(2**30), "needs more than 256 MiB"),
        (lambda: [bytes(2**26) for _ in range(2**10)], "needs more than 256 MiB"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ends its process with SIGSEGV"),
        (lambda: os._exit(3), "ends its process"),
    ],
)
def test_memory_limit_or_crash_is_reported_and_the_next_call_succeeds(limited, function, message):
    check_named(limited(lambda harmless: "answer" if harmless else function(), cpu_seconds=60), message)


def check_named(process, message):
    for _ in range(2):
        with pytest.raises(LimitExceededError, match=message):
            process.call(False)
        assert process.call(True) == "answer"


def test_cpu_limit_is_renewed_for_each_call(limited):
    process = limited(spin)
    assert [process.call(0.08) for _ in range(4)] == [0.08] * 4

    def renewing():
        for _ in range(4):
            renew_limit(0.2)
            spin(0.08)
        return "done"

    assert limited(renewing).call() == "done"


def test_idle_child_process_exits_and_is_restarted(limited, monkeypatch):
    monkeypatch.setattr("foundry.data.io.limited_process._IDLE_SECONDS", 0.01)
    process = limited(os.getpid)
    first = process.call()
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert process.call() != first


def test_child_process_inherits_no_open_files(limited):
    reading, writing = os.pipe()
    process = limited(lambda: [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()])
    assert {name.partition(":")[0] for name in process.call()} == {os.devnull, "socket"}
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
