"""Tokenizers: byte-level BPE trained on text, or any tokenizer.json, read from a file or folder."""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foundry.core.errors import ConfigError, Violation
from foundry.core.foreign import ForeignData
from foundry.run_dir.checkpoints import run_of
from foundry.run_dir.files import in_hub_cache, read_text
from foundry.run_dir.names import TOKENIZER

END_OF_DOCUMENT = "<|endoftext|>"
_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_DECLARATIONS = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
)
_KEY = "data.tokenizer"
_MAX_IDS = 2**32
"""Number of possible ids: the tokenizers library uses unsigned 32-bit integers."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Radford et al., 2019) with an end-of-document token.

    Args:
        texts: the training documents.
        vocab_size: maximum number of entries; there are fewer if the text has fewer pairs to merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str, vocab_size: int) -> tuple[Tokenizer, int]:
    """Load a tokenizer, and determine its end-of-document token.

    This token is the end-of-sequence token declared by the files next to tokenizer.json, or otherwise the first token
    of a list of common names that the tokenizer has. If there is neither, `END_OF_DOCUMENT` is added to the tokenizer.

    Args:
        path: a tokenizer.json, or a folder that contains one.
        vocab_size: entries of the model's embedding, the maximum for the tokenizer.

    Raises:
        ConfigError: tokenizer.json cannot be read, has more entries than vocab_size or than the model in its folder, or
            lacks the declared token.
    """
    file = tokenizer_file(path)
    if not file.is_file():
        message = (
            f"{path!r} has no tokenizer.json; give the file or its folder, as AutoTokenizer.save_pretrained writes it"
        )
        raise ConfigError(Violation(_KEY, message))
    declared_end = _declared_end(file.parent) if file.name == "tokenizer.json" else None
    with ForeignData(partial(_refuse_file, file)):
        tokenizer = parse_tokenizer(file.read_text(encoding="utf-8"))
        if declared_end is None and find_end_token(tokenizer) is None:
            tokenizer.add_special_tokens([END_OF_DOCUMENT])
        end = find_end_token(tokenizer) if declared_end is None else _resolve_id(tokenizer, declared_end, file.parent)
    assert end is not None
    _check_entries(tokenizer, vocab_size, path, config_value(file.parent / "config.json", "vocab_size"))
    return tokenizer, end


def parse_tokenizer(content: str) -> Tokenizer:
    """Parse the content of a tokenizer.json, and disable truncation and padding, because samples differ in length.

    Call this inside `ForeignData`: the library raises plain exceptions and Rust panics.
    """
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def count_ids(tokenizer: Tokenizer) -> int:
    """Return the largest id plus 1, the required size of an embedding; it exceeds the token count if ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without the special tokens that the tokenizer adds by default.

    Raises:
        ConfigError: the tokenizer fails on one of the texts.
    """
    with ForeignData(partial(_refuse_use, "encode a text")):
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def decode_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens, without special tokens.

    Raises:
        ConfigError: the tokenizer fails on the tokens.
    """
    with ForeignData(partial(_refuse_use, "decode tokens")):
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _refuse_file(file: Path, reason: str) -> ConfigError:
    return ConfigError(Violation(_KEY, f"is {file}, which the tokenizers library cannot load: {reason}"))


def _refuse_use(action: str, reason: str) -> ConfigError:
    return ConfigError(Violation(_KEY, f"cannot {action}: {reason}; choose another tokenizer"))


def tokenizer_file(path: str) -> Path:
    """Return the path of the tokenizer.json, given the file or its folder."""
    file = Path(path).expanduser()
    return file / "tokenizer.json" if file.is_dir() else file


def check_same(tokenizer: Tokenizer, weights: Path, key: str | None = None) -> None:
    """Check that weights were trained with the same tokenizer as the data.

    Args:
        tokenizer: tokenizer of the data.
        weights: a run directory, a checkpoint in one, a folder in transformers format, or a file next to a
            tokenizer.json. Nothing is compared if the weights have no tokenizer.json.
        key: setting that selects an additional model (such as a teacher or reference); None for the run's own model.

    Raises:
        ConfigError: the tokenizer of the weights cannot be read, or it differs.
    """
    if not (file := run_of(weights) / TOKENIZER).is_file():
        return
    with ForeignData(partial(_refuse_file, file)):
        base_tokenizer = parse_tokenizer(read_text(in_hub_cache(file)))
    if _content(base_tokenizer) == _content(tokenizer):
        return
    base_tokenizer.add_special_tokens([END_OF_DOCUMENT])  # as `load_tokenizer` does for a tokenizer without end token
    if _content(base_tokenizer) != _content(tokenizer):
        if key is not None:
            message = (
                f"is {weights}, trained with another tokenizer than the run's; give a model with the same tokenizer"
            )
            raise ConfigError(Violation(key, f"{message}, or for a new model set data.tokenizer={file}"))
        message = (
            f"differs from the tokenizer that the weights in {weights} were trained with; set data.tokenizer={file}"
        )
        raise ConfigError(Violation(_KEY, message))


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer's JSON without truncation, padding and post-processor, which foundry never uses."""
    content = json.loads(tokenizer.to_str())
    return {name: value for name, value in content.items() if name not in ("truncation", "padding", "post_processor")}


def find_end_token(tokenizer: Tokenizer) -> int | None:
    """Return the id of the first token of `_END_TOKENS` that the tokenizer has, or None."""
    ids = (tokenizer.token_to_id(token) for token in _END_TOKENS)
    return next((token for token in ids if token is not None), None)


def _declared_end(folder: Path) -> str | int | None:
    """Return the end-of-sequence token, or its id, declared in the files that transformers writes, or None."""
    for name, key in _DECLARATIONS:
        end = config_value(folder / name, key)
        end = end[0] if isinstance(end, list) and end else end
        end = end.get("content") if isinstance(end, dict) else end
        if isinstance(end, (str, int)) and not isinstance(end, bool):
            return end
    return None


def config_value(file: Path, key: str) -> Any:
    """Return the value of a key in a JSON configuration file, or None if the file or the key is missing.

    If the key is missing at the top level, `text_config` is searched (multimodal models).

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(read_text(in_hub_cache(file)))
        assert isinstance(content, dict)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AssertionError, RecursionError) as error:
        message = f"{file} cannot be read as JSON: {' '.join(str(error).split()) or 'not an object'}"
        raise ConfigError(Violation(_KEY, message)) from None
    inner = content.get("text_config")
    return content.get(key, inner.get(key) if isinstance(inner, dict) else None)


def _resolve_id(tokenizer: Tokenizer, end: str | int, folder: Path) -> int:
    if isinstance(end, str):
        token = tokenizer.token_to_id(end)
    else:
        token = end if 0 <= end < _MAX_IDS and tokenizer.id_to_token(end) is not None else None
    if token is None:
        message = f"is {folder}, which declares the end-of-sequence token {end!r}, but its tokenizer.json lacks it"
        raise ConfigError(Violation(_KEY, message))
    return token


def _check_entries(tokenizer: Tokenizer, vocab_size: int, path: str, model_vocab_size: Any) -> None:
    entries = count_ids(tokenizer)
    count = f"{entries} entries"
    if entries > tokenizer.get_vocab_size():
        count += f" ({tokenizer.get_vocab_size()} tokens with ids up to {entries - 1})"
    if isinstance(model_vocab_size, int) and entries > model_vocab_size:
        message = (
            f"{path!r} has a tokenizer of {count} but a model of {model_vocab_size}; resize the model with "
            f"transformers' resize_token_embeddings({entries}), or choose another data.tokenizer"
        )
        raise ConfigError(Violation(_KEY, message))
    if entries > vocab_size:
        message = f"is {vocab_size} but data.tokenizer={path!r} has {count}; set data.vocab_size={entries}"
        raise ConfigError(Violation("data.vocab_size", message))
