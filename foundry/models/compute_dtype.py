"""Dtype of the residual stream."""

import torch
from torch import Tensor


def to_compute_dtype(x: Tensor) -> Tensor:
    """Cast to autocast's dtype if autocast is on, so that the residual stream has the same dtype as with FSDP2."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x
