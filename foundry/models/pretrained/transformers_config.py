"""Configs of transformers models, built from fields or read from a folder, and checked before a model is built."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foundry.core.errors import ConfigError, Violation, as_text
from foundry.core.foreign import ForeignData
from foundry.models.pretrained.base_sizes import check_own_sizes, check_sizes
from foundry.models.pretrained.config_dropout import find_wrong_dropouts
from foundry.models.pretrained.stored_types import REMEDY, find_quantisation

_SIZE = re.compile(r"(size|dim|heads?|layers?|embd|positions|inner|rank|local_experts)$")


def resolve_config(
    path: str | None, architecture: str, fields: Mapping[str, Any], *, vocab_size: int, max_seq_len: int
) -> PreTrainedConfig:
    """Return the config of a new model, or of the model in a folder.

    Args:
        path: folder with a config.json; None for the config of `architecture`.
        architecture: transformers' model type.
        fields: override the defaults of the architecture or the config of the folder.
        vocab_size: vocabulary size of the data. A new model gets the same size; the model of a folder must have at
            least this size.
        max_seq_len: longest sequence in tokens, which the model's positions must allow.

    Raises:
        ConfigError: the folder, architecture or field does not exist, transformers rejects a value, or the vocabulary
            or the number of positions is too small.
    """
    check_own_sizes(fields)
    if path is None:
        config = _fresh_config(architecture, {"vocab_size": vocab_size, **fields})
    else:
        config = _folder_config(path, fields)
    _check_sizes(config, vocab_size, max_seq_len)
    _check_first_step(config, fields, path)
    return config


def _fresh_config(architecture: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    architectures = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]
    if architecture not in architectures:
        message = f"{architecture!r} is not a causal language model of transformers{_near(architecture, architectures)}"
        raise ConfigError(Violation("model.architecture", message))
    default = CONFIG_MAPPING[architecture]()
    _check_fields(default, architecture, fields)
    # The default token ids refer to the architecture's own, larger vocabulary.
    special_tokens = {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(default, name)}
    with ForeignData(refuse_fields):
        config: PreTrainedConfig = AutoConfig.for_model(architecture, **{**special_tokens, **fields})
    if violations := list(_wrong_numbers(default, fields)):
        raise ConfigError(violations)
    return config


def _wrong_numbers(default: PreTrainedConfig, fields: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield violations for negative values and sizes of 0, which transformers accepts but no model can have.

    Args:
        default: the config without these fields; a field is checked if its default is positive, or if it is a size
            without a default.
        fields: fields that the user sets. Token ids are not checked.
    """
    for name, value in fields.items():
        default_value, is_size = getattr(default, name, None), _SIZE.search(name) is not None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and not name.endswith("token_id")
        is_default_positive = isinstance(default_value, (int, float)) and default_value > 0
        if not is_number or not (is_default_positive or (default_value is None and is_size)):
            continue
        if value < 0 or (value == 0 and is_size):
            message = f"is {as_text(value)} but must be {'at least 1' if is_size else '0 or more'}"
            yield Violation(f"model.config.{name}", f"{message}; the default is {as_text(default_value)}")


def _wrong_divisions(config: PreTrainedConfig, is_new: bool) -> Iterator[tuple[str, str]]:
    """Yield the fields for heads and experts that would make the first forward pass fail, each with the reason.

    Args:
        config: config of the model.
        is_new: also compare the number of heads with the width; the config of a folder may omit the head size.
    """

    def size(name: str) -> int | None:
        value = vars(config).get(config.attribute_map.get(name, name))
        return value if isinstance(value, int) and value > 0 else None

    def violation(name: str, reason: str) -> tuple[str, str]:
        return config.attribute_map.get(name, name), f"{size(name)} but must {reason}"

    width, heads, kv_heads = size("hidden_size"), size("num_attention_heads"), size("num_key_value_heads")
    experts, active_experts = size("num_local_experts"), size("num_experts_per_tok")
    if heads and kv_heads and heads % kv_heads:
        yield violation("num_key_value_heads", f"divide the {heads} attention heads")
    if is_new and width and heads and width % heads and not any("head_dim" in name for name in config.to_dict()):
        yield violation("num_attention_heads", f"divide the width of {width}")
    if experts and active_experts and active_experts > experts:
        yield violation("num_experts_per_tok", f"be at most the number of experts, {experts}")


def _folder_config(path: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    if not (Path(path).expanduser() / "config.json").is_file():
        message = f"{path!r} is not a folder with a config.json; only local files are supported"
        raise ConfigError(Violation("model.path", message))
    folder = str(Path(path).expanduser())
    check_sizes(Path(folder))
    with ForeignData(partial(refuse_folder, path)):
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if type(getattr(config, "vocab_size", None)) is not int:
            raise ValueError(f"{config.model_type} has no vocab_size, so it is not a language model")
    _check_kernels(path, config)
    _check_quantisation(path, config)
    _check_fields(config, config.model_type, fields)
    if violations := list(_wrong_numbers(config, fields)):
        raise ConfigError(violations)
    with ForeignData(refuse_fields):
        for name, value in fields.items():
            setattr(config, name, value)
        config.validate()
    return config


def _check_fields(config: PreTrainedConfig, architecture: str, fields: Mapping[str, Any]) -> None:
    names = {*config.to_dict(), *config.attribute_map, "attn_implementation"}
    violations = [
        Violation(f"model.config.{name}", f"is not a field of transformers' {architecture} config{_near(name, names)}")
        for name in fields
        if name not in names
    ]
    if violations:
        raise ConfigError(violations)


def _check_quantisation(path: str, config: PreTrainedConfig) -> None:
    if (method := find_quantisation(config)) is not None:
        raise ConfigError(
            Violation("model.path", f"{path!r} is quantized with {method}, which is not supported; {REMEDY}")
        )


def _check_kernels(path: str, config: PreTrainedConfig) -> None:
    """Reject a folder whose config makes transformers download code: an attention kernel of the Hub.

    The name of a Hub kernel contains a `/`.
    """
    attention = getattr(config, "_attn_implementation", None)
    if "/" in str(attention):
        message = (
            f"{path!r} requires the attention kernel {attention!r} of the Hub; "
            "choose another with +model.config.attn_implementation="
        )
        raise ConfigError(Violation("model.path", message))


def _check_sizes(config: PreTrainedConfig, vocab_size: int, max_seq_len: int) -> None:
    violations = []
    if config.vocab_size < vocab_size:
        message = (
            f"is {vocab_size} but the model has {config.vocab_size} tokens; set data.vocab_size={config.vocab_size}"
        )
        violations.append(Violation("data.vocab_size", message))
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < max_seq_len:
        message = f"is {max_seq_len} but the model has {positions} positions; set data.seq_len={positions}"
        violations.append(Violation("data.seq_len", message))
    if violations:
        raise ConfigError(violations)


def _check_first_step(config: PreTrainedConfig, fields: Mapping[str, Any], path: str | None) -> None:
    """Raise a ConfigError if the model can be built with these values but fails in its first step.

    Args:
        config: config of the model.
        fields: fields that the user sets.
        path: folder of the config; None for a new model.
    """
    violations = []
    for name, reason in (*_wrong_divisions(config, is_new=path is None), *find_wrong_dropouts(config)):
        if path is None or name in fields:
            violations.append(Violation(f"model.config.{name}", f"is {reason}"))
        else:
            violations += refuse_folder(path, f"{name} is {reason}").violations
    if violations:
        raise ConfigError(violations)


def refuse_fields(reason: str) -> ConfigError:
    """Return the error for fields of `model.config` that transformers rejects, with the reason."""
    return ConfigError(Violation("model.config", f"has fields that transformers rejects: {reason}"))


def refuse_folder(path: str, reason: str) -> ConfigError:
    """Return the error for a folder that transformers cannot build a model from, with the reason."""
    message = (
        f"is {path}, from which transformers cannot build a model: {reason}; correct its files or choose another folder"
    )
    return ConfigError(Violation("model.path", message))


def _near(name: str, names: Iterable[str]) -> str:
    suggestions = difflib.get_close_matches(name, list(names), n=3)
    return f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""
