"""Whether MuJoCo can draw on this machine, asked without foundry's code."""

import functools
import os
import subprocess
import sys

_DRAW = 'import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8).render()'


@functools.cache
def reason_not_to_draw() -> str | None:
    """None if MuJoCo draws, otherwise the last line of its error.

    It is asked in a process of its own, because MuJoCo aborts a process that tries again after a failure.
    """
    environment = {"MUJOCO_GL": "egl", **os.environ}
    done = subprocess.run([sys.executable, "-c", _DRAW], env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    return None if done.returncode == 0 else (errors or ["MuJoCo does not draw"])[0]
