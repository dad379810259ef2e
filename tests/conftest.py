import os
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a shell: what the tests start would inherit it, and take no notice of Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread per process: the suite starts many, and results must not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
