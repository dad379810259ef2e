"""OmegaConf resolvers of robots, which compute settings from other settings."""

from omegaconf import DictConfig, OmegaConf

from foundry.core.errors import ConfigError
from foundry.tasks.robots.lerobot_info import read_info
from foundry.tasks.robots.schemas.simulator import TABLETOP_STATE_DIMS
from foundry.tasks.robots.schemas.simulator import tabletop_state_dim as state_dim_of

_MOST_PIXELS = 96
"""Maximum default height and width for resizing non-square images; a usual input size of policies with cameras."""
_LEAST = {"image_size": 8, "instruction_tokens": 1}
_SIZED_BY = {"state_dim": "state_key", "action_dim": "action_key", "image_size": "image_key"}


def simulator_size(name: str, *, _root_: DictConfig) -> int | None:
    """Return the default of a demonstration setting: the value of the same setting of the simulator.

    Without a simulator, which other checks report as an error, a size is 1 and the image size None.

    Raises:
        ValueError: if a user-defined simulator lacks the setting.
    """
    size: int | None = OmegaConf.select(_root_, f"simulator.{name}")
    if size is not None or name == "image_size":
        return size
    if OmegaConf.select(_root_, "simulator._target_") is None:
        return 1
    raise ValueError(f"simulator.{name} has no value; give it as +simulator.{name}=...")


def seen_size(name: str, *, _root_: DictConfig) -> int:
    """Return `image_size` or `instruction_tokens` of the data, for a policy with images and instructions.

    If the data does not set it, which other checks report as an error, the setting's minimum is returned.
    """
    size: int | None = OmegaConf.select(_root_, f"data.{name}")
    return _LEAST[name] if size is None else size


def lerobot_size(name: str, *, _root_: DictConfig) -> int | None:
    """Return a setting from the metadata of the dataset at `data.path`; the image size is None if `image_key` is null.

    If the metadata or column is invalid, which other checks report as an error, `simulator_size` gives the result.
    """
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
    """Return the state size of the tabletop task; 1 for an unknown task, which another check reports as an error."""
    task, image_size = (OmegaConf.select(_root_, f"simulator.{name}") for name in ("task", "image_size"))
    return state_dim_of(task, has_image=image_size is not None) if task in TABLETOP_STATE_DIMS else 1
