"""What transformers, and programs that read its folders, want beside weights: config, tokenizer, how to generate."""

import json
import logging
from pathlib import Path
from typing import Any

from foundry.data.splits import DataSplits
from foundry.run_dir.files import read_bytes, replaced_atomically, write_atomically
from foundry.run_dir.names import CHAT_TEMPLATE, STOP_TOKENS, TOKENIZER, TOKENIZER_FILES
from foundry.run_dir.strict_json import read_object

log = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"
_PROBE = (
    "The 12 foxes  said: \u201cIt's caf\u00e9, 3456!\u201d\n\n\te\u0301 \u65e5\u672c\u8a9e \U0001f600 x_1 = {'a': [0]}"
)
"""Words, numbers, white space, signs, composed and decomposed letters: what tokenizers differ in."""


def save_for_transformers(config: Any, data: DataSplits, source: Path, out: Path, *, with_model: bool = True) -> None:
    """Write config.json and, with a tokenizer, what makes `generate()` stop and chats those of the run.

    Whatever lay beside the tokenizer that the run was given stays as it was, but for the chat template of the run and
    the tokens that end its answers, which come before those that ended them; a first or padding token that the base's
    config has as null stays null. Of a tokenizer of foundry's own the first stop token is the end of a sequence; it
    pads, on the left, and starts a text without a prompt.

    Args:
        config: transformers' config of the model; it gets the special tokens.
        data: with the tokenizer, the stop tokens and the chat template of the run.
        source: folder with what the run has kept of `TOKENIZER_FILES`; it need not be there.
        out: folder to write into.
        with_model: False: of adapters, whose base has the config.

    Raises:
        DamagedFileError: a file in `source` is no JSON.
    """
    tokenizer = data.tokenizer
    if tokenizer is None:
        if with_model:
            config.save_pretrained(out)
        return
    settings = _find(source / _CONFIG)
    named = _find(source / "special_tokens_map.json") | settings
    generation = {name: value for name, value in _find(source / STOP_TOKENS).items() if value is not None}
    tokens = dict[str, str]()
    if ends := list(dict.fromkeys(_known(tokenizer, *data.stop_ids, generation.get("eos_token_id")))):
        pad = _id(tokenizer, named.get("pad_token"))
        pads = _known(tokenizer, pad, generation.get("pad_token_id"), _of(config, "pad_token_id"))
        firsts = _known(tokenizer, generation.get("bos_token_id"), data.bos_id, _of(config, "bos_token_id"))
        # null in the config of a base means that its model begins no text with a token, or pads with none.
        is_base = (source / "config.json").is_file()
        others = {
            name: next(iter(ids), None if is_base and _of(config, f"{name}_token_id") is None else ends[0])
            for name, ids in (("bos", firsts), ("pad", pads))
        }
        special = {"eos": ends[0]} | {name: id for name, id in others.items() if id is not None}
        tokens = {f"{name}_token": tokenizer.id_to_token(id) for name, id in special.items()}
        ids = {f"{name}_token_id": id for name, id in special.items()} | ({"eos_token_id": ends} if ends[1:] else {})
        for name, value in ids.items():
            setattr(config, name, value)
        if with_model:
            _write_json(out / STOP_TOKENS, generation | ids)
    if with_model:
        config.save_pretrained(out)
    write_atomically(out / TOKENIZER, tokenizer.to_str(pretty=True))
    if settings:
        _copy_files(source, out)
        # The source decides what a text begins with. Code, which has neither been run nor kept, is left out, and paths.
        missing = {name: token for name, token in tokens.items() if name != "bos_token" and named.get(name) is None}
        of_the_run = () if data.chat_template is None else ("chat_template",)
        left_out = {name for name in settings if name.endswith("_file")} | {"auto_map", "name_or_path", *of_the_run}
        settings = {name: value for name, value in settings.items() if name not in left_out} | missing
    else:
        settings = _own_settings(config) | tokens
    _write_json(out / _CONFIG, settings)
    if data.chat_template is not None:
        write_atomically(out / CHAT_TEMPLATE, data.chat_template)
    _check_tokens(tokenizer, out)


def _copy_files(source: Path, out: Path) -> None:
    """What is not written for the run itself."""
    for name in TOKENIZER_FILES:
        if name not in (_CONFIG, STOP_TOKENS) and (source / name).is_file():
            with replaced_atomically(out / name) as file:
                file.write(read_bytes(source / name))


def _own_settings(config: Any) -> dict[str, Any]:
    """Of a tokenizer that foundry has trained, or that came alone."""
    positions = _of(config, "max_position_embeddings")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that every version of transformers knows
        "model_input_names": ["input_ids", "attention_mask"],  # as a language model's forward takes them
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # as it has to be where texts of several lengths are continued together
        **({"model_max_length": positions} if isinstance(positions, int) else {}),
    }


def _check_tokens(tokenizer: Any, out: Path) -> None:
    """Say where transformers makes other tokens of a text than the run did.

    Some architectures have a class of tokenizers of their own, which `AutoTokenizer` takes whatever the folder says: it
    keeps the vocabulary and cuts words in its own way (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` of transformers).
    """
    from transformers import AutoTokenizer

    from foundry.data.corpora.tokenizer import encode_texts

    try:
        load: Any = AutoTokenizer.from_pretrained
        # No length, of which the probe, that no model reads, would be said to have more than a small one.
        loaded = load(str(out), local_files_only=True, trust_remote_code=False, model_max_length=2**31)
    except Exception as error:
        log.warning("transformers cannot load the tokenizer of %s: %s", out, " ".join(str(error).split()))
        return
    if loaded.convert_tokens_to_ids(loaded.tokenize(_PROBE)) != encode_texts(tokenizer, [_PROBE])[0]:
        message = "AutoTokenizer makes a %s of %s, which cuts words otherwise than the run did; load it by %s instead"
        log.warning(message, type(loaded).__name__, out, "PreTrainedTokenizerFast.from_pretrained")


def _find(file: Path) -> dict[str, Any]:
    """An object of JSON; empty where there is no such file."""
    try:
        return read_object(file)
    except FileNotFoundError:
        return {}


def _of(config: Any, name: str) -> Any:
    return getattr(config, name, None)  # some architectures know no padding


def _id(tokenizer: Any, token: Any) -> int | None:
    """The number of a token as transformers writes it: a text, or an object with one."""
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _known(tokenizer: Any, *ids: Any) -> list[int]:
    """The tokens among what files say, numbers or lists of them: some configs pad with -1."""
    flat = [one for id in ids for one in (id if isinstance(id, list) else [id])]
    return [id for id in flat if type(id) is int and 0 <= id < 2**31 and tokenizer.id_to_token(id) is not None]


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
