"""Files of an export that transformers and compatible programs need: config, tokenizer and generation config."""

import json
import logging
from pathlib import Path
from typing import Any

from foundry.data.splits import DataSplits
from foundry.run_dir.files import read_bytes, replaced_atomically, write_atomically
from foundry.run_dir.names import CHAT_TEMPLATE, STOP_TOKENS, TOKENIZER, TOKENIZER_FILES
from foundry.run_dir.strict_json import read_optional

log = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"
_PROBE = (
    "The 12 foxes  said: \u201cIt's caf\u00e9, 3456!\u201d\n\n\te\u0301 \u65e5\u672c\u8a9e \U0001f600 x_1 = {'a': [0]}"
)
"""Probe text with features that tokenizers split differently, such as whitespace, numbers and combining characters."""


def save_for_transformers(config: Any, data: DataSplits, source: Path, out: Path, *, with_model: bool = True) -> None:
    """Write config.json and, if there is a tokenizer, its files, so that `generate()` stops and chats as in the run.

    Files beside the run's original tokenizer are copied, but the chat template is the run's, the run's stop tokens come
    before the original ones, missing special tokens are added, and paths and custom code are removed. A BOS or padding
    token that no file of the base sets stays null. For a tokenizer that foundry trained, the first stop token is the
    EOS token; it also pads, on the left, and starts a text without a prompt.

    Args:
        config: transformers config of the model; the special tokens are set in it.
        data: data of the run with tokenizer, stop tokens and chat template.
        source: folder with the run's copies of `TOKENIZER_FILES`; may be missing.
        out: output folder.
        with_model: False for adapters, whose base has the config.

    Raises:
        DamagedFileError: a file in `source` is not valid JSON.
    """
    tokenizer = data.tokenizer
    if tokenizer is None:
        if with_model:
            config.save_pretrained(out)
        return
    settings = read_optional(source / _CONFIG)
    special_tokens = read_optional(source / "special_tokens_map.json") | settings
    generation = {name: value for name, value in read_optional(source / STOP_TOKENS).items() if value is not None}
    special_ids, stop_ids = _special_ids(config, data, source, special_tokens, generation)
    if special_ids:
        ids: dict[str, Any] = {f"{name}_token_id": id for name, id in special_ids.items()}
        if len(stop_ids) > 1:
            ids["eos_token_id"] = stop_ids
        for name, value in ids.items():
            setattr(config, name, value)
        if with_model:
            _write_json(out / STOP_TOKENS, generation | ids)
    if with_model:
        config.save_pretrained(out)
    write_atomically(out / TOKENIZER, tokenizer.to_str(pretty=True))
    tokens = {f"{name}_token": tokenizer.id_to_token(id) for name, id in special_ids.items()}
    if settings:
        _copy_files(source, out)
        # No BOS token is added: the original settings decide whether a text starts with one.
        missing = {
            name: token for name, token in tokens.items() if name != "bos_token" and special_tokens.get(name) is None
        }
        settings = _kept_settings(settings, keeps_template=data.chat_template is None) | missing
    else:
        settings = _own_settings(config) | tokens
    _write_json(out / _CONFIG, settings)
    if data.chat_template is not None:
        write_atomically(out / CHAT_TEMPLATE, data.chat_template)
    _check_tokens(tokenizer, out)


def _special_ids(
    config: Any, data: DataSplits, source: Path, special_tokens: dict[str, Any], generation: dict[str, Any]
) -> tuple[dict[str, int], list[int]]:
    """Return the ids of the EOS, BOS and padding tokens by name, as `eos`, and all stop tokens; empty without any.

    Args:
        config: transformers config of the model.
        data: data of the run.
        source: folder with the run's copies of the original files.
        special_tokens: special tokens of the original tokenizer, such as `pad_token`.
        generation: the original generation config.
    """
    tokenizer = data.tokenizer
    ends = list(dict.fromkeys(_valid_ids(tokenizer, *data.stop_ids, generation.get("eos_token_id"))))
    if not ends:
        return {}, []
    pad = _id(tokenizer, special_tokens.get("pad_token"))
    pads = _valid_ids(tokenizer, pad, generation.get("pad_token_id"), _config_value(config, "pad_token_id"))
    firsts = _valid_ids(tokenizer, generation.get("bos_token_id"), data.bos_id, _config_value(config, "bos_token_id"))
    # null in the config of a base means that its model uses no BOS token, or no padding token.
    is_base = (source / "config.json").is_file()
    bos_and_pad = {
        name: next(iter(ids), None if is_base and _config_value(config, f"{name}_token_id") is None else ends[0])
        for name, ids in (("bos", firsts), ("pad", pads))
    }
    return {"eos": ends[0]} | {name: id for name, id in bos_and_pad.items() if id is not None}, ends


def _kept_settings(settings: dict[str, Any], *, keeps_template: bool) -> dict[str, Any]:
    """Return the original tokenizer config without paths and custom code, which foundry never runs."""
    removed = {"auto_map", "name_or_path"} if keeps_template else {"auto_map", "name_or_path", "chat_template"}
    return {name: value for name, value in settings.items() if name not in removed and not name.endswith("_file")}


def _copy_files(source: Path, out: Path) -> None:
    """Copy the tokenizer files that `save_for_transformers` does not write itself."""
    for name in TOKENIZER_FILES:
        if name not in (_CONFIG, STOP_TOKENS) and (source / name).is_file():
            with replaced_atomically(out / name) as file:
                file.write(read_bytes(source / name))


def _own_settings(config: Any) -> dict[str, Any]:
    """Return the tokenizer config of a tokenizer that foundry trained, or that came as a single file."""
    positions = _config_value(config, "max_position_embeddings")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # known to every version of transformers
        "model_input_names": ["input_ids", "attention_mask"],  # as the forward method of a language model takes them
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # required for batched generation with prompts of different lengths
        **({"model_max_length": positions} if isinstance(positions, int) else {}),
    }


def _check_tokens(tokenizer: Any, out: Path) -> None:
    """Log a warning if transformers tokenizes the probe text differently from the run.

    Some architectures have their own tokenizer class, which `AutoTokenizer` uses regardless of the folder's settings:
    the class keeps the vocabulary but pre-tokenizes differently (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` of
    transformers).
    """
    from transformers import AutoTokenizer

    from foundry.data.corpora.tokenizer import encode_texts

    try:
        load: Any = AutoTokenizer.from_pretrained
        # No maximum length: transformers would warn that the probe, which no model reads, exceeds a small one.
        loaded = load(str(out), local_files_only=True, trust_remote_code=False, model_max_length=2**31)
    except Exception as error:
        log.warning("transformers cannot load the tokenizer of %s: %s", out, " ".join(str(error).split()))
        return
    if loaded.convert_tokens_to_ids(loaded.tokenize(_PROBE)) != encode_texts(tokenizer, [_PROBE])[0]:
        message = "AutoTokenizer loads a %s from %s, which tokenizes differently from the run; load it with %s instead"
        log.warning(message, type(loaded).__name__, out, "PreTrainedTokenizerFast.from_pretrained")


def _config_value(config: Any, name: str) -> Any:
    return getattr(config, name, None)  # the configs of some architectures have no `pad_token_id`


def _id(tokenizer: Any, token: Any) -> int | None:
    """Return the id of a token that is a string, or an object with the string as `content`; None if it is unknown."""
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _valid_ids(tokenizer: Any, *ids: Any) -> list[int]:
    """Return the valid token ids among ids and lists of ids from files; some configs have an invalid -1 for padding."""
    flat = [item for id in ids for item in (id if isinstance(id, list) else [id])]
    return [id for id in flat if type(id) is int and 0 <= id < 2**31 and tokenizer.id_to_token(id) is not None]


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
