"""Check that episodes to train on exist and match the settings."""

from collections.abc import Iterator

from foundry.config.schemas.root import Config
from foundry.config.schemas.simulator import NoSimulator
from foundry.core.errors import ConfigError, Violation
from foundry.tasks.robots.lerobot_info import LeRobotInfo, read_info
from foundry.tasks.robots.schemas.data import Demonstrations, LeRobot


def check_episodes(config: Config) -> Iterator[Violation]:
    """Yield errors if demonstrations have no simulator, or columns or sizes of a LeRobot dataset are not as set."""
    data = config.data
    if isinstance(data, Demonstrations) and isinstance(config.simulator, NoSimulator):
        message = "none is incompatible with data=demonstrations, which needs a simulator with an expert"
        yield Violation("simulator", f"{message}; choose one, or data=lerobot")
    if isinstance(data, LeRobot):
        try:
            yield from _check_columns(data, read_info(data.path))
        except ConfigError as error:
            yield from error.violations


def _check_columns(data: LeRobot, info: LeRobotInfo) -> Iterator[Violation]:
    """Check that the columns of states, actions and images exist and have the sizes in the settings.

    Raises:
        ConfigError: if the image column does not exist or has no images.
    """
    for name, column, key in (
        ("state_dim", data.state_key, "data.state_key"),
        ("action_dim", data.action_key, "data.action_key"),
    ):
        try:
            num_values = info.num_values(column, key)
        except ConfigError as error:
            yield from error.violations
            continue
        if num_values != getattr(data, name):
            message = f"is {getattr(data, name)} but {column} of {info.folder} has {num_values} numbers; leave it out"
            yield Violation(f"data.{name}", message)
    if data.image_key is not None:
        height, width = info.picture_size(data.image_key, "data.image_key")
        if data.image_size is None:
            message = f"is null but images of {data.image_key} are {height} by {width}"
            yield Violation("data.image_size", f"{message}; set the size to resize them to, such as 96")
