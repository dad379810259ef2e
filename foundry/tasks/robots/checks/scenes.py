"""Check that a simulator can render images for training."""

from collections.abc import Iterator

from foundry.config.schemas.root import Config
from foundry.config.schemas.simulator import NoSimulator
from foundry.core.errors import Violation
from foundry.tasks.robots.schemas.data import Scenes


def check_scenes(config: Config) -> Iterator[Violation]:
    """Yield an error if the data consists of rendered images and no simulator renders them."""
    data = config.data
    if isinstance(data, Scenes) and isinstance(config.simulator, NoSimulator):
        message = (
            "is none but data=scenes needs a simulator that renders images; choose one, such as simulator=touch, or"
        )
        yield Violation("simulator", f"{message} data=image_chats")
    elif isinstance(data, Scenes) and data.image_size is None:
        message = "is null but data=scenes needs a simulator that renders images; set it, for example to 48"
        yield Violation("simulator.image_size", message)
