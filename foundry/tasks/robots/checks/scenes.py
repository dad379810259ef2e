"""Check that data=scenes has a simulator that renders images."""

from collections.abc import Iterator

from foundry.config.schemas.root import Config
from foundry.config.schemas.simulator import NoSimulator
from foundry.core.errors import Violation
from foundry.tasks.robots.schemas.data import Scenes


def check_scenes(config: Config) -> Iterator[Violation]:
    """Yield an error if data=scenes is chosen without a simulator, or with one that renders no images."""
    data = config.data
    if isinstance(data, Scenes) and isinstance(config.simulator, NoSimulator):
        message = (
            "none is incompatible with data=scenes, which needs a simulator that renders images; choose one, such as "
        )
        yield Violation("simulator", f"{message}simulator=touch, or data=image_chats")
    elif isinstance(data, Scenes) and data.image_size is None:
        message = "null is incompatible with data=scenes, which needs a simulator that renders images"
        yield Violation("simulator.image_size", f"{message}; set it, for example to 48")
