"""Dtypes of the stored tensors of a base model; only float32, bfloat16 and float16 are accepted.

A weight of another dtype is usually quantized: its values are meaningless without scales, which transformers ignores
unless the folder's config.json declares the quantization.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from foundry.core.errors import listed
from foundry.run_dir.files import in_hub_cache, read_text

READ_TYPES = ("F32", "BF16", "F16")
"""Accepted dtypes of weights, in safetensors' notation."""
REMEDY = "give a folder whose weights are float32, bfloat16 or float16"

_POSITIONS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Names of stored tensors that transformers recomputes; older versions of transformers saved them."""
_SCALE = re.compile(r"scale|zero_point|absmax")


def folder_types(folder: Path) -> dict[str, str]:
    """Return the dtype of each tensor that transformers reads from a folder, in safetensors' notation.

    Raises:
        SafetensorError: a file is damaged.
        OSError: a file cannot be opened.
        ValueError: the index cannot be parsed.
    """
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if not (folder / names[0]).is_file() and index.is_file():
        try:
            names = sorted(set(json.loads(read_text(in_hub_cache(index)))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index.name} lists no weight files: {error!r}") from None
    types = dict[str, str]()
    for file in filter(Path.is_file, (folder / name for name in names)):  # transformers reports missing files
        with safe_open(file, framework="pt") as tensors:
            types |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return types


def find_quantisation(config: Any) -> str | None:
    """Return the quantization method of a transformers config; None if its weights are not quantized."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if quantisation := getattr(part, name, None):
                method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
                return str(method or name)
    return None


def find_wrong_types(
    types: Mapping[str, str], unmatched: Collection[str], ignored: Iterable[str], integral: Collection[str]
) -> str:
    """Describe stored tensors with unsupported dtypes or scales of quantized weights; "" if all can be trained.

    Args:
        types: dtype of each stored tensor, by name.
        unmatched: stored tensors that match no tensor of the model.
        ignored: patterns of stored tensors that the architecture ignores.
        integral: integer buffers of the model, such as positions.
    """
    exceptions = re.compile("|".join(f"({pattern})" for pattern in (*_POSITIONS, *ignored)))
    unsupported = [
        f"{name} ({dtype})"
        for name, dtype in sorted(types.items())
        if dtype not in READ_TYPES and name not in {*unmatched, *integral} and not exceptions.search(name)
    ]
    if unsupported:
        return f"holds {listed(unsupported, 2)}, but only {', '.join(READ_TYPES)} are supported"
    if scales := sorted(name for name in unmatched if _SCALE.search(name.rpartition(".")[2])):
        return f"holds {listed(scales, 2)}, which the model does not read: its weights are quantized"
    return ""
