"""Settings of image datasets, with class labels or with text."""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from foundry.config.image_folder import class_folders
from foundry.config.schemas.data.base import Data, path_of_files, path_of_held_out_files
from foundry.config.schemas.data.rows import OnBadRow, Templated, TrainOn
from foundry.config.setting import OnResume, setting
from foundry.core.errors import ConfigError, Violation, shown

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


@dataclass(frozen=True, kw_only=True)
class AboutPictures(Templated):
    """Base class of settings for conversations about one image each."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "images", "completions"})
    num_images: ClassVar[int] = 1

    train_on: TrainOn = setting(TrainOn.all, "which of the assistant's turns are learnt: all or the last")

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the model takes images as input."""
        wants: frozenset[str] = getattr(run.model, "wants", frozenset({"images"}))
        if is_dataclass(run.model) and "images" not in wants:
            model, data = type(run.model).__name__, type(self).__name__
            message = f"is {model}, which does not look at the pictures of data {data}; choose model=vlm"
            yield Violation("model", message)


@dataclass(frozen=True, kw_only=True)
class ImageChatFiles(AboutPictures):
    """Conversations of the user's in files of rows, each with `image`, the path of a picture."""

    _target_: str = "foundry.datasets.image_chat_files"

    path: str = path_of_files("file, folder or glob of JSONL, Parquet, Arrow or CSV files")
    validation_path: str | None = path_of_held_out_files("files for validation; null: hold out a share of `path`")
    on_bad_row: OnBadRow = setting(
        OnBadRow.refuse,
        "what becomes of rows that are no JSON, hold something else, have no answer, no picture that can be read, or "
        "too many tokens: refuse or skip",
    )
    image_size: int = setting(
        96, "height and width in pixels that pictures are brought to, whatever their own are", ge=8, le=4096
    )


@dataclass(frozen=True, kw_only=True)
class Digits(Data):
    """scikit-learn's 1,797 images of handwritten digits, 8 by 8 pixels, ten classes."""

    offers: ClassVar[frozenset[str]] = frozenset({"images", "labels"})

    _target_: str = "foundry.datasets.digits"
    image_size: int = setting(8, "height and width in pixels: the images' own", ge=8, le=8)
    num_channels: int = setting(1, "colour channels: the images' own", ge=1, le=1)
    num_classes: int = setting(10, "classes: the images' own", ge=10, le=10)
    held_out: float = setting(0.1, "share of images kept for validation", gt=0, lt=1)


class PictureFit(Enum):
    """Method of making a non-square image square."""

    crop = "crop"
    stretch = "stretch"


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Data):
    """Pictures of your own: a folder with a folder for each class, of PNG, JPEG or WebP files."""

    offers: ClassVar[frozenset[str]] = frozenset({"images", "labels"})

    _target_: str = "foundry.datasets.image_folder"
    path: str = setting("???", "folder with a folder for each class", on_resume=OnResume.data)
    image_size: int = setting(32, "height and width in pixels that pictures are brought to", ge=4, le=4096)
    num_channels: int = setting(3, "3: red, green and blue; 1: grey", ge=1, le=3)
    num_classes: int = setting("${image_classes:}", "classes: the folders in `path`", ge=1, le=10**6, runtime=True)
    fit: PictureFit = setting(
        PictureFit.crop, "of a picture that is not square: crop takes the middle, stretch all of it"
    )
    mirror: bool = setting(False, "also train on each picture the other way round, left to right")
    random_crop: int = setting(
        0,
        "pixels by which a picture is shifted at most, up, down, left and right, another way each time that it is "
        "trained on; what comes in repeats the edge; 0: none",
        ge=0,
        le=4096,
    )
    held_out: float = setting(0.05, "share of the pictures of each class kept for validation", gt=0, lt=1)

    def check(self) -> Iterator[Violation]:
        """Check that the folder exists, images have 1 or 3 channels, and shifts are smaller than the image."""
        if self.random_crop >= self.image_size:
            message = f"is {self.random_crop}, of which nothing is left of data.image_size={self.image_size}; lower it"
            yield Violation("data.random_crop", message)
        if self.num_channels == 2:
            yield Violation("data.num_channels", "is 2 but pictures have 3 colours, or are grey with 1")
        try:
            folders = class_folders(self.path)
        except ConfigError as error:
            yield from error.violations
            return
        if self.num_classes != len(folders):
            message = f"is {self.num_classes} but {shown(self.path)} has {len(folders)} folders; leave it out"
            yield Violation("data.num_classes", message)
