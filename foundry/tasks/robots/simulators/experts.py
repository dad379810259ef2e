"""Scripted experts for third-party environments: functions from the state that `Gymnasium` builds to an action.

The state of a Fetch task is its observation followed by the desired goal, in meters: 0-2 the gripper's position, 3-5
the block's position if there is one, 9 and 10 the opening of each finger, and the last three the goal. An action is the
gripper's motion (3) and the fingers' motion (1, positive opens), each in [-1, 1].
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def fetch_push(state: Vector) -> Vector:
    """Return the next action: go above the side opposite to the goal, go down, and push with closed fingers."""
    gripper, block, goal = state[:3], state[3:6], state[-3:]
    way = goal[:2] - block[:2]
    distance = float(np.linalg.norm(way))
    if distance < 0.015:
        return _move(np.zeros(3), fingers=-1)
    along = way / distance
    off = gripper[:2] - block[:2]
    ahead = off @ along
    beside = off - ahead * along
    if ahead < -0.02 and np.linalg.norm(beside) < 0.025 and gripper[2] < block[2] + 0.03:
        aim = np.array([*(goal[:2] - 0.045 * along - 0.5 * beside), block[2]])
        motion = np.clip(8 * (aim - gripper), -1, 1)
        return _move([*np.clip(motion[:2], -0.6, 0.6), motion[2]], fingers=-1)
    behind = np.array([*(block[:2] - 0.075 * along), block[2]])
    if np.linalg.norm(gripper[:2] - behind[:2]) < 0.02:
        return _move(10 * (behind - gripper), fingers=-1)
    is_low = gripper[2] < block[2] + 0.06
    above = np.array([*(gripper[:2] if is_low else behind[:2]), block[2] + 0.09])
    return _move(10 * (above - gripper), fingers=-1)


def fetch_pick_and_place(state: Vector) -> Vector:
    """Return the next action: go over the block with open fingers, go down, close them, carry the block to the goal."""
    gripper, block, goal, opening = state[:3], state[3:6], state[-3:], state[9] + state[10]
    off = gripper - block
    distance, aside = float(np.linalg.norm(off)), float(np.linalg.norm(off[:2]))
    if distance < 0.02 and opening < 0.062:
        return _move(6 * (goal - block), fingers=-1)
    if distance < 0.012:
        return _move(np.zeros(3), fingers=-1)
    height = 0.06 if aside > 0.02 else 0.0
    return _move(10 * (block + np.array([0.0, 0.0, height]) - gripper), fingers=1)


def _move(motion: Vector | list[float], fingers: float) -> Vector:
    action: Vector = np.clip([*motion, fingers], -1, 1)
    return action
