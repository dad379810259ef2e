"""The same bits from the same run on the same device, where kernels leave a choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from foundry.core.errors import ConfigError, Violation

_UNKNOWN = "does not have a deterministic implementation"


@contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """Only algorithms that give the same bits each time; on a CPU nearly all do, on a GPU they cost time.

    https://docs.pytorch.org/docs/stable/notes/randomness.html; the workspace of cuBLAS is set by `choose_device`.

    Args:
        is_wanted: else nothing is changed.

    Raises:
        ConfigError: an operation has no such algorithm.
    """
    if not is_wanted:
        yield
        return
    mode, filling = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
    fills = filling.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # what is read before it is written would be a bug
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
