"""The device of a run that is planned on fake tensors, which are on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_planned_device: ContextVar[str | None] = ContextVar("planned_device", default=None)


@contextmanager
def plan_for(device_type: str) -> Iterator[None]:
    """Compute as on another device inside the context; results are the same up to rounding, or are not used.

    Args:
        device_type: "cuda" or "cpu", device type of the planned run.
    """
    token = _planned_device.set(device_type)
    try:
        yield
    finally:
        _planned_device.reset(token)


def planned_device() -> str | None:
    """Return the device type of the planned run; None outside of `plan_for`."""
    return _planned_device.get()
