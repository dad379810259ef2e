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

    brings_hparams: ClassVar[str] = "policy"
    words_if: ClassVar[str | None] = "instruction_tokens"

    num_observations: int = setting(2, "states that a policy sees: the present one and those before it", ge=1, le=1024)
    horizon: int = setting(16, "actions of a sample, from the present one on", ge=1, le=10**5)
    state_dim: int = setting("???", "numbers in a state", ge=1, le=10**6, runtime=True)
    action_dim: int = setting("???", "numbers in an action", ge=1, le=10**6, runtime=True)
    image_size: int | None = setting(
        None,
        "height and width in pixels of the picture that a policy sees besides; null: none",
        ge=8,
        le=4096,
        runtime=True,
    )
    held_out: float = setting(0.05, "share of episodes kept for validation, at least one", gt=0, lt=1)
    instruction_tokens: int | None = setting(
        None,
        "most tokens of an instruction, the words that say what is to be done; longer ones are refused; null: a policy "
        "is not told any",
        ge=1,
        le=10**5,
        runtime=True,
    )
    vocab_size: int = setting(
        MODEL_VOCAB_SIZE,
        "entries of the byte-level BPE trained on the instructions, or most of `tokenizer`; default: those of the "
        "weights in model.backbone.init_from",
        ge=1,
        le=10**8,
        runtime=True,
        alone=4096,
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "of instructions: tokenizer.json or folder; null: train one on those of the training episodes; the weights in "
        "model.backbone.init_from bring their own",
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
        """Files that a run directory must have, each with the kind of run that writes it."""
        words = {} if self.instruction_tokens is None else {TOKENIZER: "a run with instructions"}
        return {STATISTICS: "a run over episodes"} | words

    def check(self) -> Iterator[Violation]:
        """Check that a trained byte-level tokenizer has an entry for each byte and one for the end of a document."""
        if self.instruction_tokens is not None and self.tokenizer is None:
            yield from check_entries(self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Episodes):
    """Successful episodes of the simulator's expert, the same for every seed of a run; made once, and kept."""

    _target_: str = "foundry.datasets.demonstrations"

    episodes: int = setting(300, "successful episodes", ge=2, le=10**7)
    noise: float = setting(
        0.2,
        "standard deviation of what is added to the actions that are executed, in the simulator's units; the expert's "
        "own are recorded, so that it shows how to come back",
        ge=0,
    )
    noisy_share: float = setting(0.7, "share of episodes with noise", ge=0, le=1)
    state_dim: int = setting(
        "${simulator_size:state_dim}", "numbers in a state: the simulator's", ge=1, le=10**6, runtime=True
    )
    action_dim: int = setting(
        "${simulator_size:action_dim}", "numbers in an action: the simulator's", ge=1, le=10**6, runtime=True
    )
    image_size: int | None = setting(
        "${simulator_size:image_size}",
        "height and width in pixels of the picture that a policy sees besides: the simulator's; null: none",
        ge=8,
        le=4096,
        runtime=True,
    )


@dataclass(frozen=True, kw_only=True)
class LeRobot(Episodes):
    """Episodes of your own, in a folder in LeRobot's format, version 3."""

    _target_: str = "foundry.datasets.lerobot"

    path: str = setting("???", "folder with meta/info.json", on_resume=OnResume.data)
    state_key: str = setting("observation.state", "column of the states")
    action_key: str = setting("action", "column of the actions")
    image_key: str | None = setting(
        None, "column of pictures or videos that a policy sees besides, as observation.images.front; null: none"
    )
    state_dim: int = setting(
        "${lerobot_size:state_dim}", "numbers in a state: the column's", ge=1, le=10**6, runtime=True
    )
    action_dim: int = setting(
        "${lerobot_size:action_dim}", "numbers in an action: the column's", ge=1, le=10**6, runtime=True
    )
    image_size: int | None = setting(
        "${lerobot_size:image_size}",
        "height and width in pixels that pictures are brought to; default: their own, or the shorter and at most 96 if "
        "they are not square",
        ge=8,
        le=4096,
        runtime=True,
    )

    def check(self) -> Iterator[Violation]:
        """Check that an image size comes with an image column."""
        yield from super().check()
        if self.image_key is None and self.image_size is not None:
            yield Violation("data.image_size", f"is {self.image_size} but means nothing without data.image_key")


@dataclass(frozen=True, kw_only=True)
class Scenes(AboutPictures):
    """Pictures of the starts of the simulator's episodes, with what it says about them; made once, and kept."""

    _target_: str = "foundry.datasets.scenes"

    num_scenes: int = setting(4200, "pictures, those held out among them", ge=2, le=2**30)
    seq_len: int = setting(64, "most tokens of a conversation", ge=1, le=10**8)
    vocab_size: int = setting(
        320, "entries of the byte-level BPE trained on the conversations, or most of `tokenizer`", ge=1, le=10**8
    )
    image_size: int | None = setting(
        "${simulator_size:image_size}", "height and width in pixels of the picture: the simulator's", ge=8, le=4096
    )
