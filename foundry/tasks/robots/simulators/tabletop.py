"""MuJoCo scene of a table with three colored blocks and a pusher; a policy for it trains in a minute."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.configured import configured_by
from foundry.core.simulator import Observation, Step
from foundry.tasks.robots.schemas.simulator import Tabletop as TabletopSettings
from foundry.tasks.robots.simulators.drawing import Camera
from foundry.tasks.robots.simulators.packages import import_mujoco

Vector = NDArray[np.float64]

_COLOURS = {"red": "0.85 0.15 0.15 1", "green": "0.15 0.65 0.2 1", "blue": "0.15 0.3 0.9 1"}
_RED, _GREEN, _BLUE = range(3)
_SIDES = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "far": (0.0, 1.0), "near": (0.0, -1.0)}
_COLUMNS, _ROWS, _BORDERS = ("left", "middle", "right"), ("near", "centre", "far"), (-0.08, 0.08)
"""Names of the parts of the table in `describe`, and the positions of their borders in meters from the center."""
_FASTEST = 0.5
"""Velocity in meters per second for an action of 1."""
_STEPS_PER_ACTION, _TIMESTEP = 10, 0.01
_PUSHED = 0.28
"""Distance from the center of the table, in meters, that a block must be pushed."""
_PUSHER_BODY, _FIRST_BLOCK_BODY = 1, 2

_BLOCK = """
<body name="{name}" pos="0 0 .03">
  <joint type="slide" axis="1 0 0" damping="2" frictionloss=".3"/>
  <joint type="slide" axis="0 1 0" damping="2" frictionloss=".3"/>
  <joint type="hinge" axis="0 0 1" damping=".004" frictionloss=".001"/>
  <geom type="box" size=".035 .035 .03" mass=".1" rgba="{colour}"/>
</body>"""
_SCENE = """
<mujoco>
<option timestep="{timestep}" gravity="0 0 0" integrator="implicitfast"/>
<visual><headlight ambient=".5 .5 .5" diffuse=".5 .5 .5"/></visual>
<worldbody>
  <camera name="front" pos="0 -.5 1" xyaxes="1 0 0 0 .9 .45" fovy="47"/>
  <geom type="box" size="3 3 .01" pos="0 0 -.05" rgba=".9 .9 .92 1" contype="0" conaffinity="0"/>
  <geom type="plane" size=".45 .45 .01" rgba=".82 .78 .7 1" contype="0" conaffinity="0"/>
  <geom type="box" pos="0 .4 .01" size=".41 .01 .02"/>
  <geom type="box" pos="0 -.4 .01" size=".41 .01 .02"/>
  <geom type="box" pos=".4 0 .01" size=".01 .41 .02"/>
  <geom type="box" pos="-.4 0 .01" size=".01 .41 .02"/>
  <body name="pusher" pos="0 0 .04">
    <joint name="x" type="slide" axis="1 0 0" damping="5"/>
    <joint name="y" type="slide" axis="0 1 0" damping="5"/>
    <geom type="cylinder" size=".018 .04" mass=".5" rgba=".15 .15 .15 1"/>
  </body>
  {blocks}
</worldbody>
<actuator><velocity joint="x" kv="60"/><velocity joint="y" kv="60"/></actuator>
</mujoco>"""


class Tabletop:
    """A pusher that moves in the plane among three blocks.

    Seen from above, x points right and y away from the viewer.

    Tasks:

    - `around`: touch the red block while the green one blocks the straight path. Pusher, green block and red block are
      in line up to a few millimeters, and the side on which the expert passes is random and not observable. Regression
      learns the mean of both paths, which hits the green block; a policy that samples takes one path.
    - `push`: push the named block to the named side.
    - `touch`: touch the named block and no other.

    An action is the pusher's velocity, (2,) in units of 0.5 m/s. The state contains, in meters: the pusher's position
    (2), each block's position and the cosine and sine of its angle (3 x 4), the target block (3, one-hot), and for
    `push` the side (2). With images, the state is the pusher's position and velocity (4): blocks are visible in the
    image, and only `instruction` contains the goal, which changes between episodes of `push` and `touch`.

    Raises:
        ConfigError: if MuJoCo is not installed.
    """

    action_dim = 2
    fps = 1 / (_TIMESTEP * _STEPS_PER_ACTION)

    @configured_by(TabletopSettings)
    def __init__(self, settings: TabletopSettings) -> None:
        self._mujoco = import_mujoco()
        self.task, self.image_size, self.max_steps = settings.task, settings.image_size, settings.max_steps
        self._model, self._camera = _scene()
        self._data = self._mujoco.MjData(self._model)
        self.instructions = tuple(
            _instruction(self.task, colour, side)
            for colour in (_COLOURS if self.task != "around" else list(_COLOURS)[:1])
            for side in (_SIDES if self.task == "push" else [""])
        )
        self._begin(0)
        self.state_dim = len(self._state())

    def reset(self, seed: int) -> Observation:
        """Begin an episode; the seed determines its layout, its goal, and the side on which the expert passes."""
        self._begin(seed)
        return self._observe()

    def step(self, action: NDArray[np.floating[Any]]) -> Step:
        """Simulate a tenth of a second.

        `around` and `touch` end if the pusher touches another block than the target.
        """
        self._data.ctrl[:] = _FASTEST * np.clip(action, -1, 1)
        self._mujoco.mj_step(self._model, self._data, _STEPS_PER_ACTION)
        self._steps += 1
        is_over = self._steps >= self.max_steps
        if self.task == "push":
            success = bool(self._block(self._target) @ self._side > _PUSHED)
        else:
            self._touched |= self._touching()
            success = self._touched == {self._target}
            is_over |= bool(self._touched - {self._target})
        return Step(self._observe(), success, is_over)

    def expert_action(self) -> Vector:
        """Return the expert's action, computed from all positions, the goal and the sampled passing side."""
        return {"around": self._go_around, "push": self._push, "touch": self._touch}[self.task]()

    def describe(self, draw: np.random.Generator) -> list[tuple[str, str]]:
        """Return questions about the blocks' positions with their answers, such as "left near", in random order.

        One question is the instruction, with the position of its target block as the answer, so that a model learns the
        words of instructions.
        """
        questions = [(f"where is {colour} ?", index) for index, colour in enumerate(_COLOURS)]
        questions.append((self.instruction, self._target))
        answers = list[tuple[str, str]]()
        for question, index in (questions[number] for number in draw.permutation(len(questions)).tolist()):
            column, row = np.digitize(self._block(index), _BORDERS).tolist()
            answers.append((question, f"{_COLUMNS[column]} {_ROWS[row]}"))
        return answers

    def render(self, size: int) -> NDArray[np.uint8]:
        """Render the table from the front, (size, size, 3).

        Raises:
            RuntimeError: if rendering is not available.
        """
        return self._camera.render(self._data, size)

    def close(self) -> None:
        """Free the renderers that all `Tabletop` simulators share; the next image creates new ones."""
        self._camera.close()

    def _begin(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._mujoco.mj_resetData(self._model, self._data)
        positions = _draw_line(draw) if self.task == "around" else _draw_apart(draw)
        self._data.qpos[:2] = positions[0]
        for index, position in enumerate(positions[1:]):
            self._data.qpos[2 + 3 * index : 5 + 3 * index] = [*position, draw.uniform(-0.8, 0.8)]
        self._target = _RED if self.task == "around" else int(draw.integers(len(_COLOURS)))
        side = list(_SIDES)[draw.integers(len(_SIDES))]
        self._side = np.array(_SIDES[side])
        self._turn = float(draw.choice([-1, 1]))
        self.instruction = _instruction(self.task, list(_COLOURS)[self._target], side)
        self._steps, self._touched = 0, set[int]()
        self._mujoco.mj_forward(self._model, self._data)

    def _observe(self) -> Observation:
        if self.image_size is None:
            return {"state": self._state()}
        return {"state": self._state(), "image": self.render(self.image_size)}

    def _state(self) -> NDArray[np.float32]:
        pusher = self._pusher()
        if self.image_size is not None:
            return np.concatenate([pusher, self._data.qvel[:2]], dtype=np.float32)
        angles = self._data.qpos[4::3]
        blocks = [(*self._block(i), np.cos(angle), np.sin(angle)) for i, angle in enumerate(angles)]
        goal = [np.eye(len(_COLOURS))[self._target], *([self._side] if self.task == "push" else [])]
        return np.concatenate([pusher, *blocks, *goal], dtype=np.float32)

    def _pusher(self) -> Vector:
        position: Vector = self._data.qpos[:2]
        return position

    def _block(self, index: int) -> Vector:
        position: Vector = self._data.qpos[2 + 3 * index : 4 + 3 * index]
        return position

    def _touching(self) -> set[int]:
        """Return the blocks that the pusher touches."""
        bodies = self._model.geom_bodyid[self._data.contact.geom].reshape(-1, 2)
        blocks = bodies[(bodies == _PUSHER_BODY).any(axis=1)].max(axis=1) - _FIRST_BLOCK_BODY
        return {int(block) for block in blocks if block >= 0}

    def _go_around(self) -> Vector:
        """Return the next action: pass the green block on the sampled side, go to the red one, at constant speed."""
        barrier = self._block(_GREEN)
        is_past = self._pusher()[1] > barrier[1] + 0.03
        aim = self._block(_RED) if is_past else barrier + np.array([self._turn * 0.1, 0.05])
        return 0.6 * _direction(aim - self._pusher())

    def _touch(self) -> Vector:
        obstacles = [self._block(index) for index in range(len(_COLOURS)) if index != self._target]
        return self._approach(self._block(self._target), obstacles, clearance=0.1)

    def _push(self) -> Vector:
        """Return the next action: go around the block to a place behind it, align with the target direction, push."""
        block, along = self._block(self._target), self._side
        across = np.array([-along[1], along[0]])
        behind, beside = (self._pusher() - block) @ along, (self._pusher() - block) @ across
        if behind < -0.03 and abs(beside) < 0.02:
            pushing: Vector = np.clip(along - 15 * beside * across, -1, 1)
            return pushing
        obstacles = [self._block(index) for index in range(len(_COLOURS)) if index != self._target]
        if behind < -0.045:
            return self._approach(block - 0.08 * along, obstacles, clearance=0.09)
        turn = np.sign(beside) if abs(beside) > 0.05 else self._turn
        return self._approach(block + 0.11 * turn * across - 0.06 * along, [*obstacles, block], clearance=0.09)

    def _approach(self, aim: Vector, obstacles: Sequence[Vector], clearance: float) -> Vector:
        """Return the action towards `aim`, slower near it, and around obstacles closer than `clearance`."""
        way = aim - self._pusher()
        heading = _direction(way)
        for obstacle in obstacles:
            off = self._pusher() - obstacle
            if np.linalg.norm(off) < clearance and off @ heading < 0:
                off = _direction(off)
                edge = np.array([-off[1], off[0]])
                turn = np.sign(edge @ heading) if abs(edge @ heading) > 0.2 else self._turn
                heading = turn * edge + 0.4 * off
        speed = min(1.0, 12 * float(np.linalg.norm(way)))
        return speed * _direction(heading)


@cache
def _scene() -> tuple[Any, Camera]:
    """Return the MuJoCo model of the table and its camera, which all `Tabletop` simulators share."""
    blocks = "".join(_BLOCK.format(name=name, colour=colour) for name, colour in _COLOURS.items())
    model = import_mujoco().MjModel.from_xml_string(_SCENE.format(timestep=_TIMESTEP, blocks=blocks))
    return model, Camera(model, "front")


def _instruction(task: str, colour: str, side: str) -> str:
    return f"push the {colour} block to the {side}" if task == "push" else f"touch the {colour} block"


def _draw_line(draw: np.random.Generator) -> list[Vector]:
    """Sample positions with the green block between pusher and red block, and the blue one to the side."""
    x = draw.uniform(-0.1, 0.1)
    green = np.array([x + draw.normal(0, 0.004), draw.uniform(-0.02, 0.06)])
    return [np.array([x, -0.22]), np.array([x, 0.24]), green, np.array([0.32, -0.32])]


def _draw_apart(draw: np.random.Generator) -> list[Vector]:
    """Sample positions of pusher and blocks near the center, with a minimum distance between them."""
    positions: list[Vector] = []
    while len(positions) < 1 + len(_COLOURS):
        position = draw.uniform(-0.24, 0.24, 2)
        if all(np.linalg.norm(position - other) > 0.15 for other in positions):
            positions.append(position)
    return positions


def _direction(vector: Vector) -> Vector:
    """Normalize a vector to length 1; the zero vector stays zero."""
    unit: Vector = vector / max(float(np.linalg.norm(vector)), 1e-6)
    return unit
