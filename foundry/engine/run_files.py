"""Files written into a run directory at the start, in addition to Hydra's."""

import json
from pathlib import Path
from typing import Any

from foundry.config.record.frozen import save_config
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation
from foundry.data.corpora.tokenizer import tokenizer_file
from foundry.data.splits import DataSplits
from foundry.run_dir.files import (
    UnsafeFileError,
    in_hub_cache,
    make_folder,
    read_bytes,
    replaced_atomically,
    write_atomically,
)
from foundry.run_dir.names import (
    CHAT_TEMPLATE,
    PLAN,
    RESULT,
    STATUS,
    STOP_TOKENS,
    TOKENIZER,
    TOKENIZER_FILES,
    TRANSFORMERS,
)


def write_run_files(config: Config, plan: dict[str, Any], data: DataSplits, run_dir: Path) -> None:
    """Write the configuration, the plan, and the files to open the run without its data, such as a tokenizer.

    Raises:
        ConfigError: a folder or a link occupies the path of one of these files.
    """
    try:
        save_config(config, run_dir)
        write_atomically(run_dir / PLAN, json.dumps(plan, indent=2) + "\n")
        write_vocabulary(data, run_dir)
        write_data_files(data, run_dir)
        for name in (STATUS, RESULT):
            if (run_dir / name).is_dir():
                raise UnsafeFileError(run_dir / name, "a folder")
        _keep_tokenizer_files(config.data, data, run_dir)
    except UnsafeFileError as error:
        raise ConfigError(Violation("hydra.run.dir", str(error))) from None


def write_data_files(data: DataSplits, folder: Path) -> None:
    """Write the files that the data keeps in run directories, such as statistics."""
    for name, content in data.kept.items():
        write_atomically(folder / name, content.to_json())


def write_vocabulary(data: DataSplits, folder: Path) -> None:
    """Write tokenizer, stop tokens and chat template, as far as the data has them."""
    if data.tokenizer is not None:
        write_atomically(folder / TOKENIZER, data.tokenizer.to_str(pretty=True))
    if data.stop_ids:
        ids = {"eos_token_id": list(data.stop_ids), "bos_token_id": data.bos_id}
        write_atomically(folder / STOP_TOKENS, json.dumps(ids) + "\n")
    if data.chat_template is not None:
        write_atomically(folder / CHAT_TEMPLATE, data.chat_template)


def _keep_tokenizer_files(node: Any, data: DataSplits, run_dir: Path) -> None:
    """Copy the files beside the configured tokenizer unchanged: class, special tokens, padding, maximum length."""
    path = getattr(node, "tokenizer", None)
    if data.tokenizer is None or not isinstance(path, str):
        return
    file = tokenizer_file(path)
    source = (
        copies if (copies := file.parent / TRANSFORMERS).is_dir() else file.parent
    )  # if `path` is a run directory, it has copies of these files
    if file.name != TOKENIZER or source == run_dir / TRANSFORMERS:
        return
    for name in TOKENIZER_FILES:
        try:
            content = read_bytes(in_hub_cache(source / name))
        except OSError:  # most of these files are missing, and training needs none of them
            continue
        with replaced_atomically(make_folder(run_dir / TRANSFORMERS) / name) as stream:
            stream.write(content)


def write_architecture(node: Any, model: Any, run_dir: Path) -> None:
    """Write the architecture of a model read from a transformers folder, in case that folder is deleted."""
    if isinstance(node, HuggingFace) and node.path is not None:
        write_atomically(make_folder(run_dir / TRANSFORMERS) / "config.json", model.hf_config().to_json_string())
