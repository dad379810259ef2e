"""Images of the starts of a simulator's episodes with conversations about them, to train vision-language models."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foundry.config.configured import configured_by
from foundry.config.schemas.data import ChatFiles
from foundry.core.errors import ConfigError, Violation
from foundry.core.simulator import Describing, Simulator
from foundry.data.conversations.chats import RowForm, chat_splits
from foundry.data.conversations.image_chats import add_picture_hash
from foundry.data.images.picture_examples import RowPictures
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.row_source import find_rows
from foundry.data.splits import DataSplits
from foundry.tasks.robots.data.demonstrations import FIRST_SEED as FIRST_DEMONSTRATION
from foundry.tasks.robots.data.simulated import simulator_identity
from foundry.tasks.robots.schemas.data import Scenes

FIRST_SEED = FIRST_DEMONSTRATION + 2**31
"""Simulator seed of the first scene; demonstrations use lower seeds, and evaluations even lower ones."""

_FORMAT = 1
_IMAGES, _ROWS = "images.npy", "rows.jsonl"
log = logging.getLogger(__name__)


@configured_by(Scenes)
def scenes(
    settings: Scenes,
    *,
    seed: int,
    simulator: Callable[[], Simulator] | None = None,
    simulator_settings: Mapping[str, Any] | None = None,
) -> DataSplits:
    """Return images of the starts of a simulator's episodes, with questions and answers about these images.

    Args:
        settings: number and size of the scenes, and tokenization of the conversations.
        seed: unused: runs with any seed have the same scenes and held-out scenes.
        simulator: creates the run's simulator; None if there is no simulator.
        simulator_settings: settings of the simulator.

    Raises:
        ConfigError: if there is no simulator with images and descriptions, or tokenizer or template do not fit.
    """
    image_size, count = settings.image_size, settings.num_scenes
    if simulator is None or image_size is None:
        key, value = ("simulator", "none") if simulator is None else ("simulator.image_size", "null")
        remedy = "choose one, such as simulator=touch" if simulator is None else "set it, for example to 48"
        message = f"{value} is incompatible with data=scenes, which needs a simulator that renders images; {remedy}"
        raise ConfigError(Violation(key, message))
    identity = {"format": _FORMAT, "scenes": count, "size": image_size}
    text = json.dumps(identity | simulator_identity(simulator_settings or {}), sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    cache_dir = settings.cache_dir
    folder = cached_folder(cache_dir, name, partial(_fill, simulator, count, image_size), contents="scenes")
    files = ChatFiles(path=str(folder / _ROWS), held_out=settings.held_out, cache_dir=cache_dir)
    source = find_rows(files, ("messages",))
    train, validation = (np.array([row.number - 1 for row in rows], dtype=np.int64) for rows in source.splits)
    images = np.load(folder / _IMAGES, mmap_mode="r", allow_pickle=False)
    pictures = RowPictures(images=images, places=(train, validation), content=name)
    form = RowForm.conversations(settings.train_on)
    data = chat_splits(add_picture_hash(source, pictures), form, settings, pictures=pictures)
    assert data.notes is not None
    data.notes["scenes"] = str(folder)
    return data


def _fill(simulator: Callable[[], Simulator], count: int, size: int, folder: Path) -> tuple[str, ...]:
    """Generate scenes in a folder, and return the names of the written files.

    Raises:
        ConfigError: if the simulator has no descriptions, or no images of this size.
    """
    start, shape = time.monotonic(), (count, 3, size, size)
    images = np.lib.format.open_memmap(folder / _IMAGES, mode="w+", dtype=np.uint8, shape=shape)
    with closing(simulator()) as instance, (folder / _ROWS).open("w") as rows:
        kind = type(instance).__name__
        if not isinstance(instance, Describing):
            message = f"is scenes but {kind} has no describe(); choose simulator=touch, or data=image_chats"
            raise ConfigError(Violation("data", message))
        for number in range(count):
            picture = instance.reset(FIRST_SEED + number).get("image")
            if picture is None or picture.shape != (size, size, 3):
                message = f"is {size} but {kind} returns no image of this size; leave it out"
                raise ConfigError(Violation("data.image_size", message))
            images[number] = picture.transpose(2, 0, 1)
            conversation = instance.describe(np.random.default_rng((FIRST_SEED + number, _FORMAT)))
            rows.write(json.dumps({"messages": _messages(conversation)}) + "\n")
    images.flush()
    log.info("generated %d scenes of %s in %.1f s", count, kind, time.monotonic() - start)
    return _IMAGES, _ROWS


def _messages(conversation: list[tuple[str, str]]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in conversation for role, text in zip(roles, pair, strict=True)]
