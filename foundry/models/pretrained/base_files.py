"""Check of the weight files in a model folder, before transformers opens them.

transformers opens each file named in the index of the weights, and unpickles files whose names do not end in
.safetensors.
"""

import stat
from pathlib import Path
from typing import Any

from foundry.core.errors import ConfigError, Violation, as_text
from foundry.run_dir.strict_json import DamagedFileError, read_object

_SUFFIX = ".safetensors"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_weights(folder: Path, config: Any) -> None:
    """Raise a ConfigError unless all weights are in regular .safetensors files directly inside the folder.

    Args:
        folder: model folder of transformers.
        config: the folder's PreTrainedConfig, whose `transformers_weights` field may name the file or the index.

    Raises:
        ConfigError: the index or the config names any other file, the index is damaged, or the folder also has
            adapters.
    """
    if (folder / "adapter_config.json").exists():
        message = f"{str(folder)!r} has adapters (adapter_config.json) next to its weights"
        raise ConfigError(Violation("model.path", f"{message}; merge them, or remove that file"))
    first = getattr(config, "transformers_weights", None)
    if first is None:
        first = _WEIGHTS if (folder / _WEIGHTS).is_file() else _INDEX
        if not (folder / first).exists():
            return  # transformers reports the missing file
    if isinstance(first, str) and first.endswith(f"{_SUFFIX}.index.json"):
        _require_regular(folder, first, (".json",))
        names = _shards(folder / first)
    else:
        names = [first]
    for name in names:
        _require_regular(folder, name, (_SUFFIX,))


def _shards(index: Path) -> list[Any]:
    """Return the names of the weight files in an index, each once."""
    try:
        content = read_object(index.resolve(), required={"weight_map": dict, "metadata": dict})
    except (DamagedFileError, OSError) as error:
        raise ConfigError(Violation("model.path", f"{str(index.parent)!r}: {error}")) from None
    return list({str(name): name for name in content["weight_map"].values()}.values())


def _require_regular(folder: Path, name: Any, suffix: tuple[str, ...]) -> None:
    """Check that a name refers to a regular file directly inside the folder.

    Symlinks are followed, because the Hub's cache consists of symlinks.

    Raises:
        ConfigError: the name has another suffix, leads out of the folder, or refers to no readable regular file.
    """
    problem = ""
    if not isinstance(name, str) or not name.endswith(suffix):
        problem = f"which does not end in {suffix[0]}; convert it with safetensors"
    elif "\0" in name or Path(name).name != name:
        problem = "which is outside that folder; move the file into it"
    else:
        try:
            problem = "" if stat.S_ISREG((folder / name).stat().st_mode) else "which is not a regular file; replace it"
        except OSError as error:
            problem = f"which cannot be read: {error.strerror}"
    if problem:
        raise ConfigError(Violation("model.path", f"{str(folder)!r} names the weight file {as_text(name)}, {problem}"))
