"""The compositions of `tests/evidence/table.json` match their recorded hash, data and plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from evidence import table
from support.small_files import write_small_files

from foundry.config.composition.compose import config_dir

RECORDED = table.read_table()
REGENERATE = "if this is meant, run: python tests/evidence/table.py --write"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the compositions read; its cache is shared by the tests of this file."""
    path = tmp_path_factory.mktemp("table")
    write_small_files(path)
    return path


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FOUNDRY_CACHE", raising=False)


@pytest.mark.parametrize("name", RECORDED)
def test_composition_has_its_recorded_hash_data_and_plan(name):
    recorded = table.without_memory(RECORDED[name])
    found = table.differences(recorded, table.compute(recorded, with_memory=False))
    assert not found, f"{name}: {'; '.join(found)}; {REGENERATE}"


def test_table_has_each_option_of_each_group():
    root = Path(config_dir())
    files = [path.relative_to(root) for path in root.glob("*/**/*.yaml")]
    options = {f"{file.parent.as_posix()}={file.stem}" for file in files}
    never_run = {"hydra/help=foundry", "hydra/job_logging=foundry"}
    chosen = {word for entry in RECORDED.values() for word in entry["overrides"]}
    assert options - never_run <= chosen
    assert all("config" in entry for entry in RECORDED.values())


def differences_of_llm(*changes):
    entry = table.without_memory(RECORDED["llm"])
    changed = {"overrides": [*entry["overrides"], *changes]}
    return table.differences(entry, table.compute(changed, with_memory=False))


def test_changed_learning_rate_changes_config_hash_and_plan():
    config, plan = differences_of_llm("hparams.lr=1e-3")
    assert config.startswith(f"config: {RECORDED['llm']['config']} -> ")
    assert plan == "plan: lr.first 0.00016 -> 4e-05, lr.highest 0.004 -> 0.001"


def test_changed_text_changes_data_identity_and_plan(folder):
    text = folder / "text.txt"
    before = text.read_text()
    text.write_text(before.replace("59 times 60 is 3540", "59 times 60 is 3541"))
    try:
        found = differences_of_llm()
    finally:
        text.write_text(before)
    assert [line.partition(" ")[0] for line in found] == ["data:", "plan:"]
    assert found[0].startswith("data: content ")


@pytest.mark.long
def test_recorded_plan_equals_the_plan_of_the_command(run_command, folder):
    run_command.cwd = folder
    words = RECORDED["adamw_inverse_square_root_float16_fsdp"]["overrides"]
    run_command(*words, "hydra.run.dir=planned", module="foundry.plan", variables={"FOUNDRY_CACHE": ".cache/foundry"})
    written = json.loads((folder / "planned" / "plan.json").read_text())
    assert table.rounded(table.portable(written)) == RECORDED["adamw_inverse_square_root_float16_fsdp"]["plan"]


@pytest.mark.long
def test_records_do_not_depend_on_environment_or_thread_count(tmp_path):
    """In this process one thread computes the records, in the environment of the tests."""
    there = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "TZ": "Asia/Kathmandu", "OMP_NUM_THREADS": "3"}
    words = [sys.executable, table.__file__]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, **there}, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stdout.splitlines() if "skipped" not in line]) == (0, []), done
