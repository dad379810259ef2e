"""tests/support/run_once.py: calls of pytest with a shared record run each test exactly once."""

import os
import subprocess
import sys

import pytest
from support.scripts import ROOT

FILE = """
import os
import pytest
from hypothesis import given, settings, strategies
from support.examples import examples

def test_quick(): assert examples(10) in (2, 10)
def test_quick_and_more(): pass
@pytest.mark.parametrize("text", ["a b", "é", "x"])
def test_texts(text): assert text != "x"
@pytest.mark.long
def test_long(): assert examples(10) == 10
@settings(max_examples=examples(10), database=None)
@given(strategies.integers())
def test_drawn(number): pass
@pytest.fixture
def tool():
    if "TOOL" not in os.environ:
        pytest.skip("no tool")
def test_tool(tool): pass
def test_gpu(): pytest.skip("no gpu")
"""


@pytest.mark.long
def test_calls_with_one_record_run_every_test_once(tmp_path):
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\naddopts = -m 'not long'\nmarkers =\n    long: x\n")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_any.py").write_text(FILE)
    plain = FILE.replace("from support.examples import examples", "").replace("examples(10)", "10")
    (tmp_path / "test_plain.py").write_text(plain)
    record = tmp_path / "ran"

    def call(*words, **environment):
        known = len(record.read_text().splitlines()) if record.exists() else 0
        subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "FOUNDRY_TESTS_RAN": str(record), **environment},
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        lines = record.read_text().splitlines()[known:]
        assert len(set(lines)) == len(lines)
        return {(line.split("::")[1], line.split()[0]) for line in lines if " test_plain" in line}, lines

    everywhere = {
        "test_quick",
        "test_quick_and_more",
        "test_texts[a b]",
        "test_texts[\\xe9]",
        "test_texts[x]",
        "test_drawn",
    }
    first, lines = call()
    assert first == {(name, "ran") for name in everywhere} | {("test_tool", "skipped"), ("test_gpu", "skipped")}
    reduced = {line for line in lines if line.startswith("part ")}
    assert reduced == {"part test_any.py::test_quick", "part test_any.py::test_drawn"}
    second, lines = call("-m", "long or not long", TOOL="yes")
    assert second == {("test_long", "ran"), ("test_tool", "ran"), ("test_gpu", "skipped")}
    again = {line.split("::")[1] for line in lines if line.startswith("ran test_any")}
    assert again == {"test_quick", "test_drawn", "test_long", "test_tool"}, "reduced tests run with all examples"
    third, _ = call("-m", "long or not long", TOOL="yes")
    assert third == {("test_gpu", "skipped")}
