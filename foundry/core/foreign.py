"""Boundary for readers of untrusted data: every exception of a library becomes one error of the reader."""

from collections.abc import Callable
from types import TracebackType
from typing import TypeGuard

from foundry.core.errors import ConfigError, shortened, visible

_LONGEST_REASON = 300
# Messages of torch, C++ and the kernel about host memory; Python and numpy raise MemoryError or a subclass instead.
_HOST_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc", "std::bad_array_new_length", "Cannot allocate memory")


class ForeignData:
    """Context manager that converts any exception of the body to the error of a reader.

    No library documents all exceptions that damaged or hostile data can raise in it, so all are converted. The body
    must contain only the library call and a check of its result, because errors in foundry's own code would be
    converted too. A `RuntimeError` about host memory is not converted: `explain_memory_errors` explains how to use less
    memory.

    Args:
        make_error: creates the error from the reason, which is one line.
        own_errors: error classes of the reader that the body raises itself; like `ConfigError`, they are not converted.
    """

    def __init__(self, make_error: Callable[[str], Exception], *own_errors: type[Exception]) -> None:
        self._make_error = make_error
        self._own_errors: tuple[type[Exception], ...] = (ConfigError, *own_errors)

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the reader's error in place of another exception."""
        if isinstance(error, self._own_errors) or not (isinstance(error, Exception) or is_panic(error)):
            return
        if isinstance(error, RuntimeError) and is_out_of_host_memory(error):
            return
        raise self._make_error(reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """Return an exception in one line: its message, after the type if that is a built-in one such as KeyError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = shortened(visible(str(error)), _LONGEST_REASON)
    is_sentence = isinstance(error, (ValueError, OSError)) or type(error).__module__ != "builtins"
    return message if message and is_sentence else ": ".join(filter(None, (type(error).__name__, message)))


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return whether torch or the system failed to allocate host memory, for which both raise a general exception."""
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _HOST_MEMORY)


def is_panic(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether an exception is a panic of a library written in Rust, which does not derive from `Exception`."""
    return type(error).__name__ == "PanicException"
