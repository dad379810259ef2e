"""Worker functions of test_local.py; as a script, run the function named by the first argument in two processes."""

import os
import signal
import sys
import time
from pathlib import Path

from foundry.core.errors import ConfigError, Violation
from foundry.core.stop_signals import Stopped
from foundry.launch.local import run_local


def all_reduce(offset):
    import torch

    from foundry.config.schemas.device import DeviceKind
    from foundry.config.schemas.distributed import Distributed
    from foundry.parallel.process_group import process_group

    with process_group(Distributed(), DeviceKind.cpu) as world:
        total = world.all_reduce_sum(torch.tensor(offset + world.rank))
        if world.is_main:
            sys.stdout.write("rank 0 speaks\n")
        return {
            "sum": int(total),
            "rank": world.rank,
            "world_size": world.world_size,
            "threads": os.environ["OMP_NUM_THREADS"],
        }


def fail_on_rank_one():
    import torch

    from foundry.config.schemas.device import DeviceKind
    from foundry.config.schemas.distributed import Distributed
    from foundry.parallel.process_group import process_group

    with process_group(Distributed(), DeviceKind.cpu) as world:
        if world.rank == 1:
            raise ValueError("unknown token: 99")
        world.all_reduce_sum(torch.ones(1))


def exit_early():
    sys.exit(0)


def fail_with_exit_handlers():
    """Fail after registering two exit handlers: Python's prints to stderr, C++'s (run with destructors) to stdout."""
    import atexit
    import ctypes

    c = ctypes.CDLL(None)
    assert c.__cxa_atexit(ctypes.cast(c.puts, ctypes.c_void_p), ctypes.c_char_p(b"handler of C++"), None) == 0
    atexit.register(sys.stderr.write, "handler of Python\n")
    raise ValueError("unknown token: 99")


def fail_and_say_whether_the_group_is_left():
    import torch
    import torch.distributed as dist

    from foundry.config.schemas.device import DeviceKind
    from foundry.config.schemas.distributed import Distributed
    from foundry.parallel.process_group import process_group

    try:
        with process_group(Distributed(), DeviceKind.cpu) as world:
            if world.rank == 1:
                raise ValueError("unknown token: 99")
            world.all_reduce_sum(torch.ones(1))
    except ValueError as error:
        raise ValueError(f"{error}, in a group: {dist.is_initialized()}") from error


def configuration_mistake():
    raise ConfigError([Violation("model.width", "is 7 but must be even"), Violation("seed", "is -1")])


def die_silently():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def sleep(folder):
    (Path(folder) / f"{os.getpid()}.pid").touch()
    time.sleep(120)


def train(folder):
    """Count steps until one rank receives a signal; write this rank's last step to a file, and raise Stopped."""
    from foundry.config.schemas.device import DeviceKind
    from foundry.config.schemas.distributed import Distributed
    from foundry.parallel.process_group import process_group
    from foundry.parallel.rank_flags import RankFlags
    from foundry.training.signals import Boundary, SignalHandler

    with process_group(Distributed(), DeviceKind.cpu) as world, SignalHandler() as signals:
        rank_flags = RankFlags(world)
        (Path(folder) / f"{os.getpid()}.pid").touch()
        step = 0
        while (signum := Boundary(rank_flags.exchange(signals.flags)).signum) is None:
            time.sleep(0.01)
            step += 1
        time.sleep(0.5)  # simulate saving: a signal delivered twice would take effect now
        (Path(folder) / f"{os.getpid()}.saved").write_text(str(step))
        raise Stopped(signum, step, Path(folder), "stopped")


def ignore_signals(folder):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleep(folder)


def stop_and_be_asked_again(signum):
    """Stop on `signum`; then send `signum` to the launcher, which forwards the signal to this process again."""
    from foundry.training.signals import SignalHandler

    try:
        with SignalHandler() as signals:
            os.kill(os.getpid(), signum)
            raise Stopped(signals.requested, 7, None, "stopped")
    finally:
        os.kill(os.getppid(), signum)
        time.sleep(0.5)


def stop_after_signal(signum, checkpoint):
    """Send `signum` to the launcher and wait until it is forwarded; raise Stopped, or OSError without a checkpoint."""
    from foundry.training.signals import SignalHandler

    with SignalHandler() as signals:
        os.kill(os.getppid(), signum)
        while signals.requested is None:
            time.sleep(0.01)
        if checkpoint is None:
            raise OSError("no space left on device")
        raise Stopped(signals.requested, 7, checkpoint, "requeued")


if __name__ == "__main__":
    try:
        run_local(2, globals()[sys.argv[1]], sys.argv[2])
    except Stopped as stopped:
        sys.stdout.write(str(stopped))
        raise
    except KeyboardInterrupt:
        sys.exit(130)
