"""`ForeignData` turns every exception that a library raises on foreign data into one error of its reader."""

import builtins

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.core.errors import ConfigError, Violation
from foundry.core.foreign import ForeignData


class ReaderError(RuntimeError):
    pass


class PanicException(BaseException):  # named like the class of pyo3
    pass


KINDS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    if issubclass(kind, Exception) and not issubclass(kind, (UnicodeError, BaseExceptionGroup))
]


@settings(max_examples=examples(100))
@given(kind=st.sampled_from([*KINDS, PanicException]), message=st.text())
def test_any_exception_becomes_a_one_line_reader_error(kind, message):
    with pytest.raises(ReaderError) as refused, ForeignData(lambda reason: ReaderError(f"cannot be read: {reason}")):
        raise kind(message)
    line = str(refused.value)
    assert line.isprintable()
    assert line != "cannot be read: "
    assert isinstance(refused.value.__cause__, kind)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("is no number"), "is no number"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("half \ud800 of a\npair"), "half \\ud800 of a pair"),
    ],
)
def test_reason_includes_the_exception_type_if_needed(error, reason):
    with pytest.raises(ReaderError) as refused, ForeignData(ReaderError):
        raise error
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    "error", [ConfigError(Violation("data.path", "is wrong")), LookupError("own"), KeyboardInterrupt(), SystemExit(3)]
)
def test_reader_errors_and_interruptions_pass_unchanged(error):
    with pytest.raises(type(error)) as raised, ForeignData(ReaderError, LookupError):
        raise error
    assert raised.value is error
