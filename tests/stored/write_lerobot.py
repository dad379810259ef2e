"""Writes tests/stored/lerobot-0.4.4 with LeRobot itself, which needs a separate environment (torch below 2.11).

`pip install lerobot==0.4.4`, then `python tests/stored/write_lerobot.py`: two folders, pictures in rows and in videos.
"""

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.lerobot_parts import CAMERA, FPS, LENGTHS, recorded

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["right", "up"]},
}

if __name__ == "__main__":
    state, actions, pictures = recorded()
    for kind, times in (("image", 1), ("video", 4)):  # LeRobot's AV1 encoder rejects 16 x 16 pixels
        shown = pictures.repeat(times, axis=1).repeat(times, axis=2)
        camera = {CAMERA: {"dtype": kind, "shape": shown.shape[1:], "names": ["height", "width", "channels"]}}
        dataset = LeRobotDataset.create(
            "own/recorded", FPS, FEATURES | camera, root=Path(__file__).parent / "lerobot-0.4.4" / kind
        )
        for number, (begin, length) in enumerate(zip(np.cumsum(LENGTHS) - LENGTHS, LENGTHS, strict=True)):
            for row in range(begin, begin + length):
                frame = {"observation.state": state[row], "action": actions[row], CAMERA: shown[row]}
                dataset.add_frame(frame | {"task": f"task {number % 2}"})
            dataset.save_episode()
        dataset.finalize()
