"""Benchmarks at tiny sizes: the timings mean nothing, but all sides run, and sides that train have equal losses."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.scripts import ROOT

BENCHMARKS = ROOT / "benchmarks"
PEERS = {"HF Trainer": "accelerate", "Lightning": "lightning", "accelerate": "accelerate"}


@pytest.fixture
def smoke(tmp_path, cache):
    """Return a function that runs a benchmark at tiny sizes and returns its rows by (case, side)."""

    def run(name, *words):
        record = tmp_path / "record.json"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FOUNDRY_CACHE": str(cache)}
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke", "--out", str(record), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        kept = json.loads(record.read_text())
        assert kept["name"] == (words[0] if words and not words[0].startswith("-") else name)
        assert kept["command"].endswith(" ".join([f"python benchmarks/{name}.py", "--smoke", *words]))
        assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", kept["commit"])
        assert kept["machine"]["cores"] >= 1
        assert kept["versions"]["torch"]
        headings = {column["key"] for column in kept["columns"]}
        assert all(row["values"].keys() <= headings for row in kept["rows"])
        return {(row["case"], row["side"]): row["values"] for row in kept["rows"]}

    return run


def peers():
    """Names, as in the tables, of the other libraries that are installed."""
    return {name for name, package in PEERS.items() if find_spec(package) is not None}


@pytest.mark.long
def test_throughput_benchmark_libraries_train_to_the_same_losses(smoke):
    rows = smoke("throughput", "--sides", "raw", "hf", "lightning", "accelerate", "foundry")
    assert {side for _, side in rows} == {"PyTorch loop", "foundry"} | peers()
    for values in rows.values():
        assert values["apart"][0] < 1e-4
        assert values["wall"][0] > 0
        assert values["of_peak"][0] > 0
    assert 1.0 in {values["of_wall"][0] for (_, side), values in rows.items() if "foundry" not in side}


@pytest.mark.long
def test_memory_benchmark_excludes_the_memory_of_importing_torch(smoke):
    rows = smoke("memory", "--sides", "raw", "foundry")
    assert {side for _, side in rows} == {"PyTorch loop", "foundry"}
    for values in rows.values():
        assert values["apart"][0] < 1e-4
        assert 0 < values["grown"][0] < values["peak"][0]


@pytest.mark.long
def test_sync_policy_benchmark_counts_the_traffic_of_each_policy(smoke):
    rows = smoke("sync_policy")
    assert max(values["apart"][0] for (case, _), values in rows.items() if case != "none") < 1e-4
    assert rows["none", "no exchange"]["received"] == [0]
    for side in ("foundry", "PyTorch"):
        received = {policy: rows["ddp", f"{side}, {policy}"]["received"][0] for policy in ("every", "last")}
        assert received["every"] == pytest.approx(4 * received["last"], rel=0.01)  # four microbatches in a window
    gathers, scatters = 2 * 4, 4  # of every unit except the root, which stays gathered until its backward pass
    every, last, kept = (
        rows["fsdp", f"foundry, {policy}"]["received"][0] for policy in ("every", "last", "last_keep_params")
    )
    assert last < every <= (gathers + scatters) / 2 * kept
    assert last == pytest.approx(rows["fsdp", "PyTorch, last"]["received"][0], rel=0.01)


@pytest.mark.long
@pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra bench")
@pytest.mark.parametrize(
    ("method", "sides"),
    [
        ("sft", {"TRL, padding_free", "TRL, group_by_length", "TRL, packing", "foundry, packed"}),
        ("dpo", {"TRL, precompute_ref_log_probs"}),
    ],
)
def test_finetuning_benchmark_runs_trl_settings_and_both_model_kinds(method, sides, smoke):
    rows = {side: values for (_, side), values in smoke("finetuning_trl", "--steps", "2", method).items()}
    assert rows.keys() >= sides | {"TRL", "foundry", "foundry, model=hf"}
    assert max(values["apart"][0] for side, values in rows.items() if "foundry" in side) < 1e-4


@pytest.mark.long
def test_resume_fidelity_benchmark_continues_killed_runs_without_repeated_samples(smoke):
    rows = smoke("resume_fidelity", "--sides", "foundry")
    assert rows.keys() == {("1 to 1", "foundry"), ("1 to 2", "foundry")}
    for values in rows.values():
        assert values["repeated"] == values["skipped"] == [0]
        assert 0 <= values["lost"][0] <= 6
        assert values["seconds"][0] > 0
    assert rows["1 to 1", "foundry"]["equal"] == "1 of 1"
    assert rows["1 to 2", "foundry"]["apart"][0] < 1e-4


@pytest.mark.long
def test_scaling_prediction_benchmark_predicts_a_run_before_it_trains_it(smoke):
    rows = smoke("scaling_prediction")
    assert len(rows) == 10
    large = rows["", "predicted before it was trained"]
    others = [values for side, values in rows.items() if "fitted" in side[1]]
    assert large["parameters"][0] > 3 * max(values["parameters"][0] for values in others)
    assert all(0 < values["loss"][0] < 10 and abs(values["error"][0]) < 50 for values in [*others, large])


@pytest.mark.long
def test_width_transfer_benchmark_has_equal_losses_at_the_base_width_only(smoke):
    rows = smoke("width_transfer", "--optimizers", "adamw")
    cases = ("adamw, standard", "adamw, mup")
    assert rows.keys() == {(case, width) for case in cases for width in ("16", "32")}
    losses = {key: [values["rate0"][0], values["rate1"][0]] for key, values in rows.items()}
    assert losses[cases[0], "16"] == losses[cases[1], "16"]
    assert all(one != other for one, other in zip(losses[cases[0], "32"], losses[cases[1], "32"], strict=True))
    assert all(0 < loss < 10 for row in losses.values() for loss in row)


@pytest.mark.long
def test_default_recipe_benchmark_trains_and_times_both_recipes(smoke):
    rows = smoke("default_recipe", "--seeds", "1", "--option-seeds", "0", "--corpus-seeds", "0", "--rounds", "1")
    assert rows.keys() == {("standard library", "default"), ("standard library", "former default")}
    for values in rows.values():
        assert 0 < values["each"][0] < 10
        assert values["ms"][0] > 0


@pytest.mark.long
def test_three_minutes_benchmark_evaluates_all_sides_on_the_same_text_in_time(smoke):
    rows = smoke("three_minutes", "--seeds", "1", "--rates", "0.01")
    assert {side for _, side in rows} == {"foundry"} | (peers() - {"accelerate"})
    for values in rows.values():
        assert 1.5 < values["each"][0] < 3.3  # a uniform choice of 4,096 tokens of 3.5 bytes: 12 / 3.5 bits per byte
        assert values["tokens"][0] == values["steps"][0] * 8 * 64
        assert 0 < values["seconds"][0] <= 600


@pytest.mark.long
def test_mfu_benchmark_leaves_mfu_empty_if_peak_flops_are_unknown(smoke):
    rows = smoke("mfu", "--sides", "foundry", "raw")
    assert {side for _, side in rows} == {"PyTorch loop", "foundry"}
    for values in rows.values():
        assert values["apart"][0] < 1e-3  # tolerance of bf16
        assert values["speed"][0] > 0
        assert values["mfu"] is None


@pytest.mark.long
def test_startup_benchmark_measures_cpu_time_up_to_the_first_step(smoke):
    rows = smoke("startup", "--sides", "raw")
    assert {side for _, side in rows} == {"PyTorch loop", "foundry, `tracking=none`"}
    assert all(values["processor"][0] > 0.5 for values in rows.values())


@pytest.mark.long
def test_packing_benchmark_losses_and_gradients_match_unpacked_ones(smoke):
    rows = smoke("packing")
    packed = rows["2", "packed"]
    assert packed["apart"][0] < 1e-5
    assert packed["gradients"][0] < 1e-4
    assert packed["share"][0] > rows["2", "unpacked"]["share"][0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words", "sides"),
    [
        ("step_overhead", (), {"PyTorch loop", "foundry", "difference"}),
        (
            "checkpoint",
            (),
            {
                "raw write, fsync",
                "foundry, at once",
                "foundry, in the background",
                "torch, `HuggingFaceStorageWriter`",
            },
        ),
        ("muon", ("--ranks", "2"), {"everywhere", "one owner"}),  # the script asserts bit-identical results
        ("validate", (), {"a misspelt key", "a sweep's only job"}),
    ],
)
def test_benchmark_measures_all_sides(smoke, name, words, sides):
    assert {side for _, side in smoke(name, *words)} == sides


@pytest.mark.long
@pytest.mark.skipif(find_spec("mujoco") is None, reason="needs the extra robot")
@pytest.mark.parametrize(
    ("words", "sides"),
    [
        (["--only", "around", "around_regression"], {"`diffusion_policy`", "`action_regression`"}),
        (
            ["vla", "--only", "vlm", "vla"],
            {"from `experiment=vlm_scenes`", "from `experiment=vlm_scenes`, told another"},
        ),
    ],
)
def test_policies_benchmark_trains_policies_and_measures_success(words, sides, smoke):
    rows = smoke("policies", *words)
    assert {side.removesuffix(" colour") for _, side in rows} == sides
    for values in rows.values():
        assert values["episodes"] == [2]
        assert 0 <= values["low"][0] <= values["success"][0] <= values["high"][0] <= 1
        assert values["cpu"][0] > 1


@pytest.mark.long
def test_large_files_benchmark_measures_time_and_memory_of_commands(smoke):
    rows = smoke("large_files")
    assert len(rows) == 4
    assert all(values["seconds"][0] > 0 and values["peak_mib"][0] > 10 for values in rows.values())
