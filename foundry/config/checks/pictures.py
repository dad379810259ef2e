"""What pictures with words ask of the rest of a run."""

from collections.abc import Iterator
from dataclasses import is_dataclass

from foundry.config.schemas.data import AboutPictures
from foundry.config.schemas.model import PrefixVLM
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation


def check_pictures(config: Config) -> Iterator[Violation]:
    """Say where nothing is there to be seen, and where a model does not look at what is."""
    data, model = config.data, config.model
    if isinstance(model, PrefixVLM) and model.image_size is None and getattr(data, "image_size", 0) is not None:
        yield Violation("model.image_size", "is null but the model looks at pictures; leave it out to follow the data")
    if not isinstance(data, AboutPictures):
        return
    wants: frozenset[str] = getattr(model, "wants", frozenset({"images"}))
    if is_dataclass(model) and "images" not in wants:
        message = f"is {type(model).__name__}, which does not look at the pictures of data {type(data).__name__}"
        yield Violation("model", f"{message}; choose model=vlm")
