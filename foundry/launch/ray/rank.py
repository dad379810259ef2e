"""`python -m foundry.launch.ray.rank MODULE RUN_DIR`: run a rank in a child process, and let it save if an actor dies.

When Ray ends an actor, it kills the actor's children with SIGKILL. This process stands between actor and rank: if it is
killed, Linux sends SIGTERM to the rank; if the actor dies alone, the standard input of this process ends, and it sends
SIGTERM itself. Either way the rank saves and stops. The exit code is the rank's, or 128 + the number of its signal.
"""

if __name__ == "__main__":
    from foundry.core.safe_path import leave_current_folder

    leave_current_folder()  # before the imports below

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Fork, run `python -m MODULE RUN_DIR trust=true` in the child, and wait for it."""
    module, run_dir = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it
    parent = os.getpid()
    if (rank := os.fork()) == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # survives execv
        if os.getppid() != parent:
            os._exit(1)
        os.execv(sys.executable, [sys.executable, "-m", module, run_dir, "trust=true"])

    def forward(signum: int, frame: FrameType | None) -> None:
        os.kill(rank, signum)

    def watch_actor() -> None:
        os.read(0, 1)
        os.kill(rank, signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    threading.Thread(target=watch_actor, daemon=True).start()
    _, status = os.waitpid(rank, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
