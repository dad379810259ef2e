"""Check if MuJoCo can render on this machine."""

import functools
import os
import subprocess
import sys

_DRAW = 'import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8).render()'


@functools.cache
def reason_not_to_draw() -> str | None:
    """Return None if MuJoCo can render, otherwise its error line.

    The check runs in a subprocess, because MuJoCo aborts a process that renders after a failure. It does not use
    foundry's code, so that a defect of foundry fails the tests instead of skipping them.
    """
    environment = {"MUJOCO_GL": "egl", **os.environ}
    process = subprocess.run(
        [sys.executable, "-c", _DRAW], env=environment, capture_output=True, text=True, check=False
    )
    errors = [line for line in process.stderr.splitlines() if "Error: " in line]
    return None if process.returncode == 0 else (errors or ["MuJoCo does not draw"])[0]
