"""`model=`: the model to train."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from foundry.config.init_std import parse_std
from foundry.config.schemas.model.base import Model
from foundry.config.schemas.model.parametrization import BASE_WIDTH, Parametrization, WidthSettings
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.setting import OnResume, setting
from foundry.core.errors import Violation, as_text
from foundry.run_dir.files import in_hub_cache, read_text

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

__all__ = [
    "Base",
    "DiT",
    "HuggingFace",
    "Model",
    "Parametrization",
    "PrefixVLM",
    "Transformer",
    "WidthSettings",
    "folder_settings",
]

_STD_RULES = (
    "a number, small: sqrt(2 / (5 hidden_size)), or wang: sqrt(1 / (3 hidden_size)); divided by sqrt(2 num_layers) "
    "for the output matrices of a block"
)


@dataclass(frozen=True, kw_only=True)
class Base(Model):
    """The model of another run or of a transformers folder, with its weights and tokenizer.

    Composition replaces this schema by the schema of the loaded model, so no run records `Base`.
    """

    implies_hparams: ClassVar[str] = "continued"

    _target_: str = "???"
    path: str = setting("???", "run directory or transformers folder to start from", path=True)
    which: str = setting("last", "checkpoint of the run: last, best, or the number of a step")
    trust: bool = setting(False, "run the code of a model that is not part of foundry")


@dataclass(frozen=True, kw_only=True)
class Transformer(WidthSettings):
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    widths: ClassVar[tuple[str, ...]] = ("intermediate_size", "num_heads", "num_kv_heads")
    in_transformers: ClassVar[bool] = True
    wants: ClassVar[frozenset[str]] = frozenset({"tokens"})

    _target_: str = "foundry.Transformer"
    vocab_size: int = setting("${data.vocab_size}", "vocabulary size: rows of the token embedding", ge=1, le=10**8)
    hidden_size: int = setting(256, "width of the residual stream", ge=1, le=10**6)
    intermediate_size: int = setting(704, "width of the SwiGLU feed-forward", ge=1, le=10**7)
    num_layers: int = setting(4, "number of blocks", ge=1, le=1000)
    num_heads: int = setting(4, "query heads; must divide hidden_size", ge=1, le=10**5)
    num_kv_heads: int = setting(
        4,
        "key and value heads; must divide num_heads",
        ge=1,
        le=10**5,
    )
    max_seq_len: int = setting("${data.seq_len}", "maximum sequence length in tokens", ge=1, le=10**8)
    rope_theta: float = setting(10000.0, "base of the rotary frequencies", gt=0)
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm", gt=0)
    tie_embeddings: bool = setting(False, "share one matrix between the token embedding and the output head")
    qk_norm: bool = setting(
        False,
        "RMSNorm with weights on the queries and keys of each head; exports become Qwen3 models instead of Llama",
        since="0.1.0",
    )
    zero_init_outputs: bool = setting(
        False,
        "start with zero matrices where attention and feed-forward add to the residual stream, instead of init_std",
        since="0.1.0",
    )
    residual_scalars: bool = setting(
        False,
        "before each block, multiply the residual stream by a learned factor, 1 at the start, and add the token "
        "embedding times another, 0 at the start; the model cannot be exported to transformers",
        since="0.1.0",
    )
    value_embeddings: list[int] = setting(
        list,
        "layers whose attention adds a learned embedding of the token to its values, times a learned factor, 0 at the "
        "start; [0,-1] are the first and the last layer; the model cannot be exported to transformers",
        since="0.1.0",
    )
    logit_softcap: float | None = setting(
        None,
        "replace logits by logit_softcap tanh(logits / logit_softcap), such as 30; null: no cap; the model cannot be "
        "exported to transformers",
        gt=0,
        since="0.1.0",
    )
    init_std: int | float | str = setting(
        0.02,
        f"standard deviation of initial weights: {_STD_RULES}",
        parse=parse_std,
    )
    embedding_init_std: int | float | str | None = setting(
        None,
        "standard deviation of the token embedding, and of a tied output head; null: init_std",
        parse=parse_std,
    )
    logprob_tile_tokens: int = setting(
        0,
        "tokens per tile of the output head's projection; 0: a fast size under next_token and sft, and one tile "
        "under the objectives that need more of the logits and recompute tiles in the backward pass",
        ge=0,
        le=10**12,
        on_resume=OnResume.same,
    )

    @property
    def value_embedding_layers(self) -> list[int]:
        """Indices of the layers in `value_embeddings`, all counted from the first layer."""
        return [layer % self.num_layers for layer in self.value_embeddings]

    def check(self) -> Iterator[Violation]:
        """Check that the head counts divide the hidden size and each other, and that value embeddings have a layer."""
        yield from super().check()
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            yield Violation(
                "model.num_heads",
                f"is {self.num_heads} but must divide model.hidden_size={self.hidden_size} into even head sizes",
            )
        if self.num_heads % self.num_kv_heads:
            yield Violation(
                "model.num_kv_heads", f"is {self.num_kv_heads} but must divide model.num_heads={self.num_heads}"
            )
        key, count = "model.value_embeddings", self.num_layers
        if missing := [layer for layer in self.value_embeddings if not -count <= layer < count]:
            message = f"has {missing[0]} but the model has {count} layers; choose numbers from {-count} to {count - 1}"
            yield Violation(key, message)
        elif len(layers := self.value_embedding_layers) > len(set(layers)):
            unique = ",".join(map(str, dict.fromkeys(layers)))
            yield Violation(key, f"is {self.value_embeddings}, which names a layer twice; set it to [{unique}]")

    def check_export(self) -> Iterator[Violation]:
        """Yield a violation for each option without a model class in transformers.

        A model that transformers cannot load with any options is exported as weights without a config.
        """
        if not self.in_transformers:
            return
        if self.residual_scalars:
            yield _without_export("residual_scalars", "true", "false")
        if self.value_embeddings:
            yield _without_export("value_embeddings", str(self.value_embeddings), "[]")
        if self.logit_softcap is not None:
            yield _without_export("logit_softcap", as_text(self.logit_softcap), "null")

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that tensor parallelism divides all sizes evenly, and the precision of residual scalars."""
        yield from super().check_with(run, launch)
        if self.residual_scalars and run.precision.mode is PrecisionMode.pure_bf16:
            message = "is true but bf16 factors near 1 lose their updates to rounding; choose precision=amp_bfloat16"
            yield Violation("model.residual_scalars", message)
        size = run.distributed.tensor_parallel
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size") if self.is_divided else ():
            if (value := getattr(self, name)) % size:
                message = f"is {value} but must be a multiple of distributed.tensor_parallel={size}"
                yield Violation(f"model.{name}", f"{message}; the next is {-(-value // size) * size}")


@dataclass(frozen=True, kw_only=True)
class PrefixVLM(Transformer):
    """A vision-language model: a convolutional stem for images in front of the decoder of model=transformer."""

    supports_mup: ClassVar[bool] = False
    is_divided: ClassVar[bool] = False
    in_transformers: ClassVar[bool] = False
    implies_hparams: ClassVar[str] = "vlm"
    wants: ClassVar[frozenset[str]] = frozenset({"tokens", "images"})

    _target_: str = "foundry.PrefixVLM"
    image_size: int | None = setting(
        "${data.image_size}", "height and width of an image in pixels; a multiple of 8", ge=8, le=4096
    )
    num_images: int = setting(1, "images per sample", ge=1, le=1024)
    hidden_size: int = setting(128, "width of the residual stream", ge=1, le=10**6)
    intermediate_size: int = setting(384, "width of the SwiGLU feed-forward", ge=1, le=10**7)
    init_std: int | float | str = setting(
        "wang",
        f"standard deviation of initial weights, except convolutions, which use their fan-in: {_STD_RULES}",
        parse=parse_std,
    )
    embedding_init_std: int | float | str | None = setting(
        0.1,
        "standard deviation of the token embedding, close to the image tokens', and of a tied output head; null: "
        "init_std",
        parse=parse_std,
    )
    tie_embeddings: bool = setting(True, "share one matrix between the token embedding and the output head")

    def check(self) -> Iterator[Violation]:
        """Check the settings of the decoder, the image size, and that there are no value embeddings."""
        yield from super().check()
        if self.value_embeddings:
            message = f"is {self.value_embeddings} but image patches are no tokens of the vocabulary; leave it out"
            yield Violation("model.value_embeddings", message)
        if self.image_size is not None and self.image_size % 8:
            near = max(8, round(self.image_size / 8) * 8)
            message = f"is {self.image_size} but must be a multiple of 8, the patch size in pixels; set data.image_size"
            yield Violation("model.image_size", f"{message}={near}")

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the image size is not null, unless the image size of the data is also null."""
        yield from super().check_with(run, launch)
        if self.image_size is None and getattr(run.data, "image_size", 0) is not None:
            message = "is null but the model reads images; leave it out to follow the data"
            yield Violation("model.image_size", message)


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Model):
    """Any causal language model of transformers, built from its config or loaded from a local folder."""

    is_divided: ClassVar[bool] = False
    in_transformers: ClassVar[bool] = True
    wants: ClassVar[frozenset[str]] = frozenset({"tokens"})

    _target_: str = "foundry.HuggingFaceCausalLM"
    path: str | None = setting(
        None,
        "folder with config.json and weights; null: build `architecture` with new weights",
        path=True,
    )
    architecture: str = setting("llama", "transformers model type to build if path is null")
    config: dict[str, Any] = setting(
        dict, "fields of the transformers config, which override its defaults or the values of the folder"
    )
    vocab_size: int = setting(
        "${data.vocab_size}",
        "vocabulary size of a new model, or minimum vocabulary size of a loaded one; default: the data's",
        ge=1,
        le=10**8,
    )
    max_seq_len: int = setting(
        "${data.seq_len}", "maximum sequence length in tokens, at most the model's number of positions", ge=1, le=10**8
    )
    init_std: int | float | str | None = setting(
        None,
        f"standard deviation of new weights: {_STD_RULES}; null: the initialization of the architecture",
        parse=parse_std,
    )
    embedding_init_std: int | float | str | None = setting(
        None,
        "standard deviation of token and position embeddings, and of a tied output head; null: init_std",
        parse=parse_std,
    )

    def check(self) -> Iterator[Violation]:
        """Check that `config` of a new model is given, because transformers' default has billions of parameters.

        Also check the initial standard deviations and the sizes of a pretrained model in a folder.
        """
        if self.path is None and not self.config:
            message = (
                f"is empty and model.path is null; give a folder, or the size of a new {self.architecture}: "
                "'+model.config={hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4}'"
            )
            yield Violation("model.config", message)
        yield from self._check_init_std()
        yield from self._check_folder()

    def _check_folder(self) -> Iterator[Violation]:
        """Check that a pretrained model in `path` has enough vocabulary entries and positions for the data."""
        if self.path is None:
            return
        config = folder_settings(self.path) | self.config
        entries = config.get("vocab_size")
        positions = config.get("max_position_embeddings", config.get("n_positions"))
        if isinstance(entries, int) and entries < self.vocab_size:
            message = (
                f"is {self.vocab_size} but the model in {self.path} has {entries} tokens; set it to {entries}, if the "
                "tokenizer has no more entries, or enlarge the model with resize_token_embeddings of transformers"
            )
            yield Violation("data.vocab_size", message)
        if isinstance(positions, int) and positions < self.max_seq_len:
            message = f"is {self.max_seq_len} but the model has {positions} positions; set data.seq_len={positions}"
            yield Violation("data.seq_len", message)

    def _check_init_std(self) -> Iterator[Violation]:
        std_settings = {
            f"model.{name}": value
            for name, value in (("init_std", self.init_std), ("embedding_init_std", self.embedding_init_std))
            if value is not None
        }
        if self.path is not None:
            for key, value in std_settings.items():
                yield Violation(key, f"is {value} but the weights come from model.path={self.path}; set it to null")
        elif self.init_std is None and std_settings:
            message = f"is {self.embedding_init_std} but model.init_std is null; set both or neither"
            yield Violation("model.embedding_init_std", message)
        elif self.init_std is not None:
            for name in (name for name in ("initializer_range", "init_std") if name in self.config):
                message = f"is {self.config[name]} but model.init_std={self.init_std}; remove one"
                yield Violation(f"model.config.{name}", message)


def _without_export(name: str, value: str, default: str) -> Violation:
    message = f"is {value} but no model class of transformers has this option, so the run cannot be exported"
    remedy = f"use it with foundry sample and foundry eval, or train a model with model.{name}={default}"
    return Violation(f"model.{name}", f"{message}; {remedy}")


def folder_settings(path: str) -> dict[str, Any]:
    """Return the text model's settings in config.json of a transformers folder, or {} if the file cannot be read.

    Errors in the folder are reported when the model is built.
    """
    try:
        content = json.loads(read_text(in_hub_cache(Path(path).expanduser() / "config.json")))
    except (OSError, ValueError, RecursionError):
        return {}
    inner = content.get("text_config") if isinstance(content, dict) else None
    return inner if isinstance(inner, dict) else content if isinstance(content, dict) else {}


@dataclass(frozen=True, kw_only=True)
class DiT(WidthSettings):
    """A class-conditional diffusion transformer with adaptive layer norm (Peebles and Xie, 2023)."""

    widths: ClassVar[tuple[str, ...]] = ("num_heads",)
    is_divided: ClassVar[bool] = False
    wants: ClassVar[frozenset[str]] = frozenset({"images", "labels"})

    _target_: str = "foundry.DiT"
    image_size: int = setting("${data.image_size}", "height and width in pixels", ge=1, le=10**5)
    num_channels: int = setting("${data.num_channels}", "colour channels", ge=1, le=10**5)
    num_classes: int = setting("${data.num_classes}", "classes to condition on", ge=1, le=10**8)
    patch_size: int = setting(2, "height and width of a patch in pixels; must divide image_size", ge=1, le=10**5)
    hidden_size: int = setting(128, "width of the residual stream; a multiple of 4", ge=1, le=10**6)
    base_width: int = setting(128, BASE_WIDTH, ge=1, le=10**6, since="0.1.0")
    num_layers: int = setting(4, "number of blocks", ge=1, le=1000)
    num_heads: int = setting(4, "attention heads; must divide hidden_size", ge=1, le=10**5)
    mlp_ratio: float = setting(4.0, "feed-forward width divided by hidden_size", gt=0, le=1000)

    def check(self) -> Iterator[Violation]:
        """Check that `patch_size` divides `image_size`, and that `num_heads` and 4 divide `hidden_size`."""
        yield from super().check()
        if self.image_size % self.patch_size:
            yield Violation(
                "model.patch_size", f"is {self.patch_size} but must divide model.image_size={self.image_size}"
            )
        if self.hidden_size % self.num_heads:
            yield Violation(
                "model.num_heads", f"is {self.num_heads} but must divide model.hidden_size={self.hidden_size}"
            )
        if self.hidden_size % 4:
            yield Violation(
                "model.hidden_size",
                f"is {self.hidden_size} but must be a multiple of 4, for the sines and cosines of two axes",
            )
