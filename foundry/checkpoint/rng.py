"""Exact state of a rank's random number generators as plain JSON."""

import base64
import random
import sys
from typing import Any

import torch
from torch import Tensor

from foundry.parallel.device import cuda_rng_state, set_cuda_rng_state


def seed_rng(seed: int) -> None:
    """Seed the generators of torch and Python, and of numpy if it is imported.

    Args:
        seed: the seed; it should differ between ranks, so that dropout differs.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the RNG state of torch on the CPU and on this rank's device, of Python, and of numpy if it is imported.

    Args:
        device: device of this rank; reading the generator of a GPU does not synchronize with it.

    Returns:
        Plain JSON for `set_rng_state`.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": _encode(torch.get_rng_state()), "python": [version, list(internal), gauss]}
    if device.type == "cuda":
        state["cuda"] = _encode(cuda_rng_state(device))
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the generators; the state of a missing generator (such as a GPU's on a CPU machine) is ignored.

    Args:
        state: the state from `rng_state`.
        device: device of this rank.
    """
    torch.set_rng_state(_decode(state["torch"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), None if gauss is None else float(gauss)))
    if device.type == "cuda" and "cuda" in state:
        set_cuda_rng_state(_decode(state["cuda"]), device)
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))


def _encode(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
