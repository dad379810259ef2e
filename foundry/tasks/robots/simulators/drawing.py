"""Rendering of MuJoCo scenes."""

import weakref
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from foundry.tasks.robots.simulators.packages import import_mujoco


class Camera:
    """Renderer of one camera, without effects that are slow on a CPU: shadows, reflections, antialiasing.

    A MuJoCo renderer is created for each image size on first use, which takes about 60 ms; therefore all `Tabletop`
    simulators share a camera.

    Args:
        model: MuJoCo's MjModel of the scene.
        name: name of the camera.
    """

    _obstacle: ClassVar[str | None] = None
    """Reason why rendering failed; None if it has not failed.

    MuJoCo aborts a process that tries again after its first renderer failed.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        self._renderers: dict[int, Any] = {}

    def render(self, data: Any, size: int) -> NDArray[np.uint8]:
        """Render the current scene in `data`, MuJoCo's MjData, as an image (size, size, 3).

        Raises:
            RuntimeError: if rendering is not available.
        """
        if Camera._obstacle is not None:
            raise RuntimeError(Camera._obstacle)
        try:
            renderer = self._renderers.get(size) or self._make_renderer(size)
            renderer.update_scene(data, camera=self._name)
            picture: NDArray[np.uint8] = renderer.render()
        except Exception as error:  # any exception of MuJoCo, PyOpenGL or the driver
            message = f"MuJoCo cannot render here ({type(error).__name__}: {error}); it needs EGL or another MUJOCO_GL"
            Camera._obstacle = message
            raise RuntimeError(message) from error
        return picture

    def close(self) -> None:
        """Free the renderers; the next image creates new ones."""
        _close(self._renderers)

    def _make_renderer(self, size: int) -> Any:
        mujoco, visual = import_mujoco(), self._model.vis
        visual.global_.offwidth = max(visual.global_.offwidth, size)
        visual.global_.offheight = max(visual.global_.offheight, size)
        visual.quality.offsamples = visual.quality.shadowsize = 0
        context = getattr(mujoco, "GLContext", None)
        if context is not None and not hasattr(context, "_context"):
            context._context = None  # GLContext.__del__ reads the attribute even if __init__ failed
        renderer = mujoco.Renderer(self._model, size, size)
        flags = mujoco.mjtRndFlag
        for flag in (flags.mjRND_SHADOW, flags.mjRND_REFLECTION, flags.mjRND_SKYBOX, flags.mjRND_HAZE):
            renderer.scene.flags[flag] = 0
        if not self._renderers:  # without close(): MuJoCo cannot free a renderer after EGL was shut down at exit
            weakref.finalize(self, _close, self._renderers)
        self._renderers[size] = renderer
        return renderer


def _close(renderers: dict[int, Any]) -> None:
    for renderer in renderers.values():
        renderer.close()
    renderers.clear()
