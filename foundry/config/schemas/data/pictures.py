"""Settings of image datasets, with class labels or with text."""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from foundry.config.image_folder import class_folders
from foundry.config.schemas.data.base import Data, path_of_files, path_of_held_out_files
from foundry.config.schemas.data.rows import OnBadRow, Templated, TrainOn
from foundry.config.setting import OnResume, setting
from foundry.core.errors import ConfigError, Violation, as_text, counted

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


@dataclass(frozen=True, kw_only=True)
class AboutPictures(Templated):
    """Base class of settings for conversations about one image each."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "images", "completions"})
    num_images: ClassVar[int] = 1

    train_on: TrainOn = setting(TrainOn.all, "assistant turns that count in the loss: all or the last")

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the model takes images as input."""
        wants: frozenset[str] = getattr(run.model, "wants", frozenset({"images"}))
        if is_dataclass(run.model) and "images" not in wants:
            model, data = type(run.model).__name__, type(self).__name__
            message = f"is {model}, which does not read the images of data {data}; choose model=vlm"
            yield Violation("model", message)


@dataclass(frozen=True, kw_only=True)
class ImageChatFiles(AboutPictures):
    """Your own conversations about images: rows with a column `image`, the path of an image file."""

    _target_: str = "foundry.datasets.image_chat_files"

    path: str = path_of_files("file, folder or glob of JSONL, Parquet, Arrow or CSV files")
    validation_path: str | None = path_of_held_out_files("validation files; null: hold out a fraction of `path`")
    on_bad_row: OnBadRow = setting(
        OnBadRow.refuse,
        "handling of rows that are invalid JSON, have unexpected content, no answer, no readable image or too many "
        "tokens: refuse or skip",
    )
    image_size: int = setting(96, "height and width in pixels after resizing, the same for all images", ge=8, le=4096)


@dataclass(frozen=True, kw_only=True)
class Digits(Data):
    """scikit-learn's 1,797 images of handwritten digits, 8 by 8 pixels, ten classes."""

    offers: ClassVar[frozenset[str]] = frozenset({"images", "labels"})

    _target_: str = "foundry.datasets.digits"
    image_size: int = setting(8, "height and width in pixels; fixed", ge=8, le=8)
    num_channels: int = setting(1, "colour channels; fixed", ge=1, le=1)
    num_classes: int = setting(10, "number of classes; fixed", ge=10, le=10)
    held_out: float = setting(0.1, "fraction of images held out for validation", gt=0, lt=1)


class PictureFit(Enum):
    """Method of making a non-square image square."""

    crop = "crop"
    stretch = "stretch"


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Data):
    """Your own images: a folder of PNG, JPEG or WebP files for each class."""

    offers: ClassVar[frozenset[str]] = frozenset({"images", "labels"})

    _target_: str = "foundry.datasets.image_folder"
    path: str = setting("???", "folder with a subfolder for each class", on_resume=OnResume.data)
    image_size: int = setting(32, "height and width in pixels after resizing", ge=4, le=4096)
    num_channels: int = setting(3, "colour channels: 3 for RGB, 1 for greyscale", ge=1, le=3)
    num_classes: int = setting(
        "${image_classes:}", "number of classes; default: number of folders in `path`", ge=1, le=10**6, runtime=True
    )
    fit: PictureFit = setting(
        PictureFit.crop,
        "how to make non-square images square: crop: cut out the middle; stretch: distort the whole image",
    )
    mirror: bool = setting(False, "also train on the horizontally flipped version of each image")
    random_crop: int = setting(
        0,
        "maximum shift in pixels, vertical and horizontal, drawn anew each time that an image is used in training; "
        "edge pixels are repeated; 0: no shift",
        ge=0,
        le=4096,
    )
    held_out: float = setting(0.05, "fraction of the images of each class held out for validation", gt=0, lt=1)

    def check(self) -> Iterator[Violation]:
        """Check that the folder exists, images have 1 or 3 channels, and shifts are smaller than the image."""
        if self.random_crop >= self.image_size:
            message = f"is {self.random_crop} but must be below data.image_size={self.image_size}; lower it"
            yield Violation("data.random_crop", message)
        if self.num_channels == 2:
            yield Violation("data.num_channels", "is 2 but must be 3 for color images or 1 for grayscale images")
        try:
            folders = class_folders(self.path)
        except ConfigError as error:
            yield from error.violations
            return
        if self.num_classes != len(folders):
            number = counted(len(folders), "folder")
            message = f"is {self.num_classes} but {as_text(self.path)} has {number}; leave it out"
            yield Violation("data.num_classes", message)
