"""Find settings without test coverage: ignore each field in turn and run the tests that depend on it.

    python tests/mutate_fields.py record      # run the tests and record the fields they use; more words go to pytest
    python tests/mutate_fields.py try         # ignore the fields one at a time, 60 s each at most, 180 minutes in all
    python tests/mutate_fields.py try 'DDP.*' FSDP.cpu_offload
    python tests/mutate_fields.py report      # print the test that noticed each field

A field counts as noticed if a test fails while every run has the field's default value, and passes otherwise
(`support/field_reads.py` defines "uses"). One process imports and collects all tests; each field is tried
in a process forked from it, with the tests that have a run with a non-default value, shortest first.
`--by-reader` ignores a field in one module at a time: a field that two modules read needs a test of each.
Results are kept in a folder (`--folder`), so that `record` and `try` can be interrupted and called again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
_TICK_SECONDS = 0.1
NOTICED, UNNOTICED, UNUSED, TIMEOUT = "noticed", "unnoticed", "unused", "timeout"


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "foundry-fields")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="note which tests use which fields; further words go to pytest")
    trial = commands.add_parser("try", help="ignore fields one at a time")
    trial.add_argument(
        "patterns", nargs="*", default=["*"], help="keys to try in this order, as Class.field; with * and ?"
    )
    trial.add_argument("--seconds", type=float, default=60.0, help="limit for one field")
    trial.add_argument("--minutes", type=float, default=180.0, help="limit for all fields")
    trial.add_argument("--by-reader", action="store_true", help="ignore a field in one module at a time")
    trial.add_argument("--again", action="store_true", help="try fields that have a result, too")
    commands.add_parser("report", help="print all results")
    options, more = parser.parse_known_args(words)
    if more and options.command != "record":
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.command == "record":
        return record(options.folder, more)
    if options.command == "try":
        return try_fields(options)
    return report(options.folder)


def record(folder, words):
    """Run pytest and record the fields that each test uses."""
    environment = os.environ | {"FOUNDRY_FIELDS": f"record:{folder}", "PYTHONPATH": _with_tests()}
    command = [sys.executable, "-m", "pytest", f"--rootdir={TESTS.parent}", "-p", "support.field_reads", *words]
    return subprocess.call(command, env=environment)


def _with_tests():
    return os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))


def read_uses(folder):
    """Return the tests that use each key, with their seconds, shortest first; a use in a setup counts for the file."""
    seconds, setups, tests_of = defaultdict(float), defaultdict(float), defaultdict(dict)
    for path in folder.glob("*/seconds"):
        for line in path.read_text().splitlines():
            duration, phase, outcome, test = line.split("\t")
            if outcome == "passed":
                file = test.partition("::")[0]
                seconds[test] = max(seconds[test], float(duration)) if phase == "call" else seconds[test]
                setups[file] = max(setups[file], float(duration)) if phase == "setup" else setups[file]
                tests_of[file][test] = None
    uses = defaultdict(dict)
    for path in folder.glob("*/uses-*"):
        for line in path.read_text().splitlines():
            key, reader, test, phase = line.split("\t")
            file = test.partition("::")[0]
            for each in tests_of[file] if phase == "setup" else [test]:
                uses[key][each] = uses[f"{key}@{reader}"][each] = seconds[each] + setups[file]
    return {key: dict(sorted(tests.items(), key=lambda item: item[1])) for key, tests in uses.items()}


def try_fields(options):
    """Collect the tests of the chosen fields in this process, then try each field in forks of this process."""
    os.environ |= {"FOUNDRY_FIELDS": "on", "PYTHONPATH": _with_tests()}
    sys.path.insert(0, str(TESTS))
    from support.field_reads import defaults

    uses, done = read_uses(options.folder), read_results(options.folder)
    names = [name for name in uses if "@" in name] if options.by_reader else list(defaults)
    chosen = [name for pattern in options.patterns for name in sorted(names) if _fits(name, pattern)]
    tests_of = {name: uses.get(name, {}) for name in dict.fromkeys(chosen) if options.again or name not in done}
    for name in [name for name, tests in tests_of.items() if not tests]:
        keep_result(options.folder, name, {"result": UNUSED})
        _say(f"{name}: {describe({'result': UNUSED})}")
        del tests_of[name]
    if not tests_of:
        return 0
    files = sorted({test.partition("::")[0] for tests in tests_of.values() for test in tests})
    words = ["-n", "0", "-q", "-m", "long or not long", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    words += [f"--basetemp={options.folder / 'tmp'}", *(str(TESTS.parent / file) for file in files)]
    return pytest.main(words, plugins=[Trials(options, tests_of)])


def _fits(name, pattern):
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("@")[0], pattern)


class Trials:
    """Pytest plugin that replaces the test loop: it ignores one field at a time and runs the tests of that field."""

    def __init__(self, options, tests_of):
        self.options, self.tests_of = options, tests_of

    def pytest_runtestloop(self, session):
        session.config._tmp_path_factory.getbasetemp()  # a child process would empty an existing folder
        items = {item.nodeid: item for item in session.items}
        deadline = time.monotonic() + 60 * self.options.minutes
        for number, (key, tests) in enumerate(self.tests_of.items(), start=1):
            if time.monotonic() > deadline:
                _say(f"{len(self.tests_of) - number + 1} fields are left")
                break
            result = self.try_field(key, [items[test] for test in tests if test in items])
            keep_result(self.options.folder, key, result)
            _say(f"[{number}/{len(self.tests_of)}] {key}: {describe(result)}")
        return True

    def try_field(self, key, tests):
        """Run tests while a field is ignored; a failure counts only if the test passes otherwise."""
        began, skipped = time.monotonic(), 0
        while tests:
            index, why = self._first_failure(key, tests)
            if why is not None:
                return {"result": why, "tests": skipped + (index or 0)}
            if index is None:
                return {"result": UNNOTICED, "tests": skipped + len(tests)}
            if self._first_failure(None, [tests[index]]) == (None, None):
                took = round(time.monotonic() - began, 1)
                return {"result": NOTICED, "test": tests[index].nodeid, "tests": skipped + index + 1, "seconds": took}
            skipped, tests = skipped + index + 1, tests[index + 1 :]
        return {"result": UNNOTICED, "tests": skipped}

    def _first_failure(self, ignored, tests):
        """Run tests in a fork; return the index of the first failed or unfinished test, and why it is unfinished."""
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(read)
            os.setsid()
            _run_in_child(ignored, tests, write)
        os.close(write)
        ticks = int(self.options.seconds / _TICK_SECONDS)
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            ticks -= 1
            if ticks < 0:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(_TICK_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # remaining ranks and servers
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read().decode().split()
        if said and said[-1].startswith("failed:"):
            return int(said[-1].partition(":")[2]), None
        if said and said[-1] == "passed":
            return None, None
        return len(said), TIMEOUT if ticks < 0 else f"{TIMEOUT}: the process ended"


def _run_in_child(ignored, tests, write):
    """Run tests until the first failure and write each outcome to the pipe."""
    from support.field_reads import state

    plugins = tests[0].config.pluginmanager
    plugins.unregister(name="terminalreporter")
    state.ignored = ignored
    os.environ["FOUNDRY_FIELDS"] = "on" if ignored is None else f"ignore:{ignored}"
    failures = []

    class Failures:
        def pytest_runtest_logreport(self, report):
            failures.append(report.failed and report.when != "teardown")

    plugins.register(Failures())
    for index, test in enumerate(tests):
        following = tests[index + 1] if index + 1 < len(tests) else None
        test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
        if any(failures):
            os.write(write, f"failed:{index}".encode())
            os._exit(0)
        os.write(write, b"done ")
    os.write(write, b"passed")
    os._exit(0)


def keep_result(folder, key, result):
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps({"key": key, **result}) + "\n")


def read_results(folder):
    """Return the last result of each key."""
    path = folder / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line.pop("key"): line for line in lines}


def describe(result):
    if result["result"] == NOTICED:
        return f"noticed by {result['test']}"
    if result["result"] == UNUSED:
        return "no test has another value than the default"
    return f"{result['result']} after {result['tests']} tests"


def report(folder):
    """Print the fields, grouped by result."""
    by_result = defaultdict(list)
    for key, result in sorted(read_results(folder).items()):
        by_result[result["result"]].append(f"{key}: {describe(result)}")
    for name, lines in sorted(by_result.items()):
        _say(f"{name}: {len(lines)}")
        for line in lines:
            _say(f"  {line}")
    return 0


def _say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
