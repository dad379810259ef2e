"""Deterministic algorithms: repeated runs on the same device give the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from foundry.core.errors import ConfigError, Violation

_UNKNOWN = "does not have a deterministic implementation"


@contextmanager
def deterministic(is_enabled: bool) -> Iterator[None]:
    """Use only deterministic algorithms inside the context: on a CPU nearly all algorithms, on a GPU slower ones.

    See https://docs.pytorch.org/docs/stable/notes/randomness.html; `choose_device` sets the workspace of cuBLAS.

    Args:
        is_enabled: False changes nothing.

    Raises:
        ConfigError: an operation inside the context has no deterministic algorithm.
    """
    if not is_enabled:
        yield
        return
    mode, filling = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
    fills = filling.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # saves time; reading uninitialized memory is a bug anyway
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if _UNKNOWN not in str(error):
            raise
        operation = str(error).split(_UNKNOWN, 1)[0].strip()
        message = f"is true but {operation} has no deterministic algorithm on this device; set it to false"
        raise ConfigError(Violation("hparams.deterministic", message)) from error
    finally:
        torch.set_deterministic_debug_mode(mode)
        filling.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = benchmark
