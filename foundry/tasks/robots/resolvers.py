"""Values of the configuration of robots that are computed from others."""

from omegaconf import DictConfig, OmegaConf

from foundry.core.errors import ConfigError
from foundry.tasks.robots.lerobot_info import read_info
from foundry.tasks.robots.schemas.simulator import TABLETOP_STATE_DIMS
from foundry.tasks.robots.schemas.simulator import tabletop_state_dim as state_dim_of

_MOST_PIXELS = 96
"""Height and width to which pictures are brought that are not square, at most: what policies from cameras are shown."""
_LEAST = {"image_size": 8, "instruction_tokens": 1}
_SIZED_BY = {"state_dim": "state_key", "action_dim": "action_key", "image_size": "image_key"}


def simulator_size(name: str, *, _root_: DictConfig) -> int | None:
    """What a setting of demonstrations is by the simulator; without one, of which rules say so, 1.

    Raises:
        ValueError: it is a simulator of the user's own, whose settings do not say.
    """
    size: int | None = OmegaConf.select(_root_, f"simulator.{name}")
    if size is not None or name == "image_size":
        return size
    if OmegaConf.select(_root_, "simulator._target_") is None:
        return 1
    raise ValueError(f"simulator.{name} has no value; give it as +simulator.{name}=...")


def seen_size(name: str, *, _root_: DictConfig) -> int:
    """What a policy that sees and is told takes from the data; where that has none, as rules say, the least."""
    size: int | None = OmegaConf.select(_root_, f"data.{name}")
    return _LEAST[name] if size is None else size


def lerobot_size(name: str, *, _root_: DictConfig) -> int | None:
    """What a setting is by the dataset in `data.path`; of none that can be read, as rules say, the simulator's."""
    path, column = (OmegaConf.select(_root_, f"data.{key}") for key in ("path", _SIZED_BY[name]))
    if name == "image_size" and column is None:
        return None
    try:
        info = read_info(str(path))
        if name != "image_size":
            return info.num_values(str(column), "")
        height, width = info.picture_size(str(column), "")
    except ConfigError:
        return simulator_size(name, _root_=_root_)
    return height if height == width else min(height, width, _MOST_PIXELS)


def tabletop_state_dim(*, _root_: DictConfig) -> int:
    """Numbers in the state of the run's task; of a task that there is not, of which its own check says so, 1."""
    task, image_size = (OmegaConf.select(_root_, f"simulator.{name}") for name in ("task", "image_size"))
    return state_dim_of(task, has_image=image_size is not None) if task in TABLETOP_STATE_DIMS else 1
