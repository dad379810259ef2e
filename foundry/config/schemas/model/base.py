"""Base class of the settings of models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foundry.config.setting import OnResume, setting
from foundry.core.errors import Violation

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


@dataclass(frozen=True, kw_only=True)
class Model:
    """Base class of model settings.

    Attributes:
        same_as_data: names of sizes that must be equal in model and data.
        is_divided: the model supports tensor parallelism.
        in_transformers: transformers can load exports of the model.
        language_part: name of the part that reads tokens, whose pretrained weights determine the tokenizer; None if the
            model itself reads tokens.
    """

    same_as_data: ClassVar[tuple[str, ...]] = ("image_size", "num_images", "num_channels")
    is_divided: ClassVar[bool] = True
    in_transformers: ClassVar[bool] = False
    language_part: ClassVar[str | None] = None

    _target_: str
    init_from: str | None = setting(
        None,
        "initial weights: a run, a checkpoint, a .safetensors file or a transformers folder; all other state is new",
        path=True,
        on_resume=OnResume.allowed,
        runtime=True,
    )

    def check_export(self) -> Iterator[Violation]:
        """Yield a violation for each setting that makes an export impossible; a model without any can be exported."""
        yield from ()

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the model supports tensor parallelism; user-defined models are checked when they are built."""
        size = run.distributed.tensor_parallel
        if size > 1 and not self.is_divided:
            message = (
                f"is {size} but model {type(self).__name__} does not support tensor parallelism; set it to 1, or choose"
            )
            yield Violation("distributed.tensor_parallel", f"{message} model=transformer")
