"""`data=`: episodes of a robot, and images rendered by a simulator."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from foundry.config.schemas.data.base import MODEL_TOKENIZER, MODEL_VOCAB_SIZE, Data, check_entries
from foundry.config.schemas.data.pictures import AboutPictures
from foundry.config.setting import OnResume, setting
from foundry.core.errors import Violation
from foundry.run_dir.names import TOKENIZER
from foundry.tasks.robots.names import STATISTICS


@dataclass(frozen=True, kw_only=True)
class Episodes(Data):
    """Episodes of a robot as windows: recent observations and the next actions."""

    implies_hparams: ClassVar[str] = "policy"
    words_if: ClassVar[str | None] = "instruction_tokens"

    num_observations: int = setting(
        2, "number of observations that a policy sees: the current one and the previous ones", ge=1, le=1024
    )
    horizon: int = setting(16, "number of actions in a sample, from the current one on", ge=1, le=10**5)
    state_dim: int = setting("???", "size of the state", ge=1, le=10**6, runtime=True)
    action_dim: int = setting("???", "size of an action", ge=1, le=10**6, runtime=True)
    image_size: int | None = setting(
        None,
        "height and width in pixels of the image that a policy also sees; null: no image",
        ge=8,
        le=4096,
        runtime=True,
    )
    held_out: float = setting(0.05, "fraction of episodes held out for validation, at least one episode", gt=0, lt=1)
    instruction_tokens: int | None = setting(
        None,
        "maximum tokens of an instruction, which describes the task in words; longer ones are refused; null: no "
        "instructions",
        ge=1,
        le=10**5,
        runtime=True,
    )
    vocab_size: int = setting(
        MODEL_VOCAB_SIZE,
        "vocabulary size of the byte-level BPE trained on the instructions, or upper limit for `tokenizer`; default: "
        "from the weights in model.backbone.init_from",
        ge=1,
        le=10**8,
        runtime=True,
        alone=4096,
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "tokenizer.json of the instructions, or its folder; null: train a tokenizer on the instructions of the "
        "training episodes; default: from the weights in model.backbone.init_from",
        path=True,
        on_resume=OnResume.data,
        runtime=True,
        alone=None,
    )

    @property
    def offers(self) -> frozenset[str]:
        """Entries of a sample that models can require."""
        return frozenset({"actions"} if self.instruction_tokens is None else {"actions", "instructions"})

    @property
    def run_files(self) -> Mapping[str, str]:
        """Files without which a run on this data cannot be opened, each with the kind of run that writes it."""
        words = {} if self.instruction_tokens is None else {TOKENIZER: "a run with instructions"}
        return {STATISTICS: "a run over episodes"} | words

    def check(self) -> Iterator[Violation]:
        """Check that a tokenizer to be trained has an entry for each byte and one for the end of a document."""
        if self.instruction_tokens is not None and self.tokenizer is None:
            yield from check_entries(self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Episodes):
    """Successful episodes of the simulator's expert, the same for every seed of a run; generated once and cached."""

    _target_: str = "foundry.datasets.demonstrations"

    episodes: int = setting(300, "number of successful episodes", ge=2, le=10**7)
    noise: float = setting(
        0.2,
        "standard deviation of the noise on executed actions, in the simulator's units; the expert's actions are "
        "recorded without it, so that they show how to recover",
        ge=0,
    )
    noisy_share: float = setting(0.7, "fraction of episodes with noise", ge=0, le=1)
    state_dim: int = setting(
        "${simulator_size:state_dim}", "size of the state; default: from the simulator", ge=1, le=10**6, runtime=True
    )
    action_dim: int = setting(
        "${simulator_size:action_dim}", "size of an action; default: from the simulator", ge=1, le=10**6, runtime=True
    )
    image_size: int | None = setting(
        "${simulator_size:image_size}",
        "height and width in pixels of the image that a policy also sees; default: from the simulator; null: no image",
        ge=8,
        le=4096,
        runtime=True,
    )


@dataclass(frozen=True, kw_only=True)
class LeRobot(Episodes):
    """Your own episodes, in a folder in LeRobot's format, version 3."""

    _target_: str = "foundry.datasets.lerobot"

    path: str = setting("???", "folder with meta/info.json", on_resume=OnResume.data)
    state_key: str = setting("observation.state", "column of the states")
    action_key: str = setting("action", "column of the actions")
    image_key: str | None = setting(
        None, "column of the images or videos that a policy also sees, such as observation.images.front; null: none"
    )
    state_dim: int = setting(
        "${lerobot_size:state_dim}", "size of the state; default: from the column", ge=1, le=10**6, runtime=True
    )
    action_dim: int = setting(
        "${lerobot_size:action_dim}", "size of an action; default: from the column", ge=1, le=10**6, runtime=True
    )
    image_size: int | None = setting(
        "${lerobot_size:image_size}",
        "height and width in pixels after resizing; default: the size in the files, or for non-square images the "
        "shorter side, at most 96",
        ge=8,
        le=4096,
        runtime=True,
    )

    def check(self) -> Iterator[Violation]:
        """Check that an image size comes with an image column."""
        yield from super().check()
        if self.image_key is None and self.image_size is not None:
            yield Violation("data.image_size", f"is {self.image_size} but has no effect without data.image_key")


@dataclass(frozen=True, kw_only=True)
class Scenes(AboutPictures):
    """Images of the starts of the simulator's episodes, with conversations about them; generated once and cached."""

    _target_: str = "foundry.datasets.scenes"

    num_scenes: int = setting(4200, "number of images, including held-out ones", ge=2, le=2**30)
    seq_len: int = setting(64, "maximum tokens of a conversation", ge=1, le=10**8)
    vocab_size: int = setting(
        320,
        "vocabulary size of the byte-level BPE trained on the conversations, or upper limit for `tokenizer`",
        ge=1,
        le=10**8,
    )
    image_size: int | None = setting(
        "${simulator_size:image_size}",
        "height and width of the image in pixels; default: from the simulator",
        ge=8,
        le=4096,
    )
