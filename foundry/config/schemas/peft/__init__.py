"""`peft=`: training of all weights, or of adapters on frozen weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from foundry.config.build import weights_of_parts
from foundry.config.schemas.optimizer import Muon
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.setting import OnResume, setting
from foundry.core.errors import Violation

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

HEAD = "lm_head"


class BaseDtype(Enum):
    """Storage dtype of the frozen matrices of blocks.

    Attributes:
        auto: the compute dtype of amp, which does not change the results; fp32 without amp.
        fp32: fp32.
    """

    auto = "auto"
    fp32 = "fp32"


@dataclass(frozen=True, kw_only=True)
class Peft:
    """Training of all weights."""

    method: str = setting("none", "name of the chosen option")

    @property
    def narrows_base(self) -> bool:
        """True if frozen matrices may be stored in their compute dtype."""
        return False

    def check(self) -> Iterator[Violation]:
        """Check that `method` matches the class; otherwise its fields would be missing or ignored."""
        method = type(self).method
        if self.method != method:
            yield Violation("peft.method", f"is {self.method} but peft={method} is chosen; choose peft={self.method}")


@dataclass(frozen=True, kw_only=True)
class LoRA(Peft):
    """Low-rank adapters (Hu et al., 2021) of linear layers; all other weights are frozen."""

    method: str = "lora"
    adapter_dim: int = setting(8, "rank of the adapters; a power of 2", ge=1, le=2**16)
    alpha: float = setting(16.0, "adapters are scaled by alpha / adapter_dim", gt=0)
    adapter_dropout: float | None = setting(
        None, "dropout probability of the adapters' inputs; null: no dropout", ge=0, lt=1
    )
    target_modules: list[str] = setting(
        lambda: ["*_proj"],
        "layers with adapters: last parts of their names, wildcards for whole names, or Megatron's linear_qkv, "
        "linear_proj, linear_fc1, linear_fc2",
    )
    rslora: bool = setting(False, "scale adapters by alpha / sqrt(adapter_dim) instead")
    base_dtype: BaseDtype = setting(
        BaseDtype.auto,
        "dtype of the frozen matrices of blocks: auto: the compute dtype of amp, with the same results; fp32",
        on_resume=OnResume.same,
    )
    merge: bool = setting(
        False,
        "foundry.export merges the adapters into the weights, in fp32, and writes a plain model",
        on_resume=OnResume.same,
    )

    @property
    def narrows_base(self) -> bool:
        """True if `base_dtype` is auto."""
        return self.base_dtype is BaseDtype.auto

    def check(self) -> Iterator[Violation]:
        """Check the adapter's rank and the names of its target layers."""
        yield from super().check()
        if self.adapter_dim & (self.adapter_dim - 1):
            lower = 1 << (self.adapter_dim.bit_length() - 1)
            message = f"is {self.adapter_dim} but must be a power of 2; nearest: {lower} or {2 * lower}"
            yield Violation("peft.adapter_dim", message)
        if not self.target_modules:
            yield Violation("peft.target_modules", "is empty; name layers, such as ['*_proj']")
        if heads := [name for name in self.target_modules if name.rpartition(".")[2] == HEAD]:
            message = f"has {heads[0]}, whose matrix is used without calling the layer; leave it out"
            yield Violation("peft.target_modules", f"{message}, or train all weights with peft=none")

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the base is one run or folder, and that optimizer, precision and distribution suit adapters."""
        for name, path in weights_of_parts(run.model).items():
            message = f"is {path} but peft=lora saves only adapters, whose base must be one run or folder; train a run"
            remedy = "without peft first, then start from it with model=base"
            yield Violation(f"model.{name}.init_from", f"{message} {remedy}")
        if isinstance(run.optimizer, Muon):
            message = "is muon, which would make every direction of peft=lora's thin matrices equally large"
            yield Violation("optimizer", f"{message}; choose optimizer=adamw")
        if run.precision.mode is PrecisionMode.pure_bf16:
            message = "is pure_bf16, which loses most updates of adapters to rounding; choose precision=amp_bfloat16"
            yield Violation("precision", message)
        if (size := run.distributed.tensor_parallel) > 1:
            message = f"is {size} but adapters of peft=lora do not support tensor parallelism; set it to 1"
            yield Violation("distributed.tensor_parallel", message)
