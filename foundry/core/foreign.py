"""Boundary of the readers of foreign data: every exception of a library becomes one error of the reader."""

from collections.abc import Callable
from types import TracebackType
from typing import TypeGuard

from foundry.core.errors import ConfigError, shortened, visible

_LONGEST_REASON = 300
# Messages of torch, C++ and the kernel about host memory; Python's MemoryError and numpy's are classes of their own.
_HOST_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc", "std::bad_array_new_length", "Cannot allocate memory")


class ForeignData:
    """Context in which any exception of the body becomes the error of a reader.

    No library lists the exceptions that damaged or hostile data can raise in it, so that none is named here. The body
    is a call of the library and a check of its result, since an error of our own code would become a line, too. A
    `RuntimeError` about memory passes: `memory_explained` says how to need less.

    Args:
        refuse: makes the error from the reason, which is one line.
        passes: errors of the reader that the body raises itself; they are raised as they are, like `ConfigError`.
    """

    def __init__(self, refuse: Callable[[str], Exception], *passes: type[Exception]) -> None:
        self._refuse = refuse
        self._passes: tuple[type[Exception], ...] = (ConfigError, *passes)

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the reader's error in place of another one."""
        if isinstance(error, self._passes) or not (isinstance(error, Exception) or is_panic(error)):
            return
        if isinstance(error, RuntimeError) and is_out_of_host_memory(error):
            return
        raise self._refuse(reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """Return the message of an exception in one line, preceded by its type if the message needs it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = shortened(visible(str(error)), _LONGEST_REASON)
    is_sentence = isinstance(error, (ValueError, OSError)) or type(error).__module__ != "builtins"
    return message if message and is_sentence else ": ".join(filter(None, (type(error).__name__, message)))


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return whether torch or the system could not allocate host memory, which has no exception of its own."""
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _HOST_MEMORY)


def is_panic(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether a library written in Rust has panicked, which is no `Exception`."""
    return type(error).__name__ == "PanicException"
