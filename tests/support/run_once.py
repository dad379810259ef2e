"""Split the tests over several calls of pytest: each call skips the tests that an earlier call has run.

`FOUNDRY_TESTS_RAN=FILE pytest ...` reads FILE and appends one line for each test: `ran`, `skipped` or, if the call used
only a fraction of the drawn examples, `part`, then its node id. A test counts as done if its line says `ran`.
"""

from pathlib import Path

import pytest

from support.examples import examples, selection

_PART = "part of the examples"


def _is_reduced(item):
    """Return whether the settings of a hypothesis test call `examples`, and it has reduced their number."""
    is_hypothesis_test = getattr(item.function, "is_hypothesis_test", False)
    return is_hypothesis_test and not selection.is_all and getattr(item.module, "examples", None) is examples


class RunOnce:
    """Pytest plugin that deselects completed tests and records the outcome of the remaining tests.

    Args:
        file: path of the record; it may not exist yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._completed = {line.removeprefix("ran ") for line in lines if line.startswith("ran ")}
        self._lines: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._completed])
        items[:] = [item for item in items if item.nodeid not in self._completed]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        selection.has_reduced = False
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        try:
            return (yield)
        finally:
            if selection.has_reduced or _is_reduced(item):
                item.user_properties.append((_PART, True))

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self._lines[report.nodeid] = "skipped"
        elif report.when == "call" or report.failed:
            self._lines[report.nodeid] = "part" if (_PART, True) in map(tuple, report.user_properties) else "ran"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if not hasattr(session.config, "workerinput"):  # an xdist worker knows only its share
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{outcome} {test}\n" for test, outcome in self._lines.items())
