"""A small file system that tests can fill up."""

import os
import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def small_disk(folder, size):
    """Mount a tmpfs of `size`, such as 400k; yield a function that resizes it. Skip the test if mounting fails."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk: {mounted.stderr.decode().strip()}")
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(file):
    """Write zeros until the disk is full; deleting the file frees the space."""
    with file.open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(4096)):
            pass
