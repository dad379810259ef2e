"""Stored run directories of tasks that `test_stored_runs` does not cover are continued, used and exported.

`tests/stored/write_tasks.py` wrote them and explains how to add one for a new task or version.
"""

import json
import re
import shutil

import pytest
from stored.write_tasks import CONTINUED, RUNS, STEPS, TASKS, outcome, overrides
from support.small_files import write_small_files

from foundry.config.record.strict_yaml import read_yaml

AFTER_ONE_MORE_STEP = json.loads((TASKS / CONTINUED).read_text())
EVAL = ("foundry.eval", "max_samples=4", "out=out.json")
SAMPLE = ("foundry.sample", "out=out")
ANSWER = (*SAMPLE, "prompt='3 times 7?'", "max_new_tokens=4")
USES = {
    "diffusion": [(*SAMPLE, "labels=[3]", "steps=2")],
    "policy": [],
    "lora": [ANSWER, EVAL],
    "dpo": [ANSWER, EVAL],
    "grpo": [ANSWER, EVAL],
    "distillation": [ANSWER, EVAL],
    "vlm": [(*ANSWER, "image=images/dark/1.png"), EVAL],
}
"""Commands to test with each run; an export follows them."""
SAME = {"rel": 1e-5, "abs": 1e-6}
"""Tolerances: the order of sums depends on the CPU."""
FIRST = ("diffusion", "lora", "vlm")
USED = [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in RUNS]


@pytest.fixture
def stored(request, run_command):
    """A copy of the stored run directory that the parameter names, next to its training data."""
    write_small_files(run_command.cwd)
    return shutil.copytree(TASKS / request.param, run_command.cwd / request.param, symlinks=True)


@pytest.mark.parametrize("stored", RUNS, indirect=True)
def test_stored_run_continues_as_in_the_version_that_wrote_it(run_command, stored):
    run_command(*overrides(stored.name, STEPS + 1))
    assert outcome(stored) == pytest.approx(AFTER_ONE_MORE_STEP[stored.name], **SAME)


@pytest.mark.parametrize("stored", USED, indirect=True)
def test_stored_run_is_sampled_evaluated_and_exported(run_command, stored):
    for module, *words in USES[stored.name]:
        run_command(f"run={stored.name}", *words, module=module)
    measured, file = outcome(stored), run_command.cwd / "out.json"
    again = {f"val_{name}": value for name, value in json.loads(file.read_text()).items()} if file.exists() else {}
    common = measured.keys() & again.keys()
    assert {name: again[name] for name in common} == pytest.approx({name: measured[name] for name in common}, **SAME)
    run_command(f"run={stored.name}", "out=exported", module="foundry.export")
    assert list((run_command.cwd / "exported").glob("*.safetensors"))


def texts(node):
    if isinstance(node, dict):
        return [text for value in node.values() for text in texts(value)]
    if isinstance(node, list):
        return [text for value in node for text in texts(value)]
    return [node] if isinstance(node, str) else []


def test_stored_runs_contain_no_absolute_paths():
    files = [path for path in TASKS.rglob("*") if path.suffix in (".json", ".yaml") and path.name != "tokenizer.json"]
    assert len(files) > 7 * len(RUNS)
    for file in files:
        content = json.loads(file.read_text()) if file.suffix == ".json" else read_yaml(file)
        assert [text for text in texts(content) if re.match(r"(/|~)", text)] == [], file
