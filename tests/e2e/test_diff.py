"""`python -m foundry.diff` of real runs and of damaged run directories."""

import json
import math
import shutil
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import TINY_LM

from foundry.commands.diff import compare

RUN = [*TINY_LM, "hparams.max_steps=4", "tracking=none", "evaluation.interval=2", "evaluation.write_samples=false"]


def test_diff_compares_settings_plan_curves_and_results_of_runs(run_command):
    changed = {"one": [], "again": [], "other": ["hparams.lr=2e-3", "hparams.max_steps=6"]}
    for name, words in changed.items():
        run_command(*RUN, *words, f"hydra.run.dir='a={name}'")

    same, _ = run_command("a=one", "a=again", module="foundry.diff")
    assert "settings    the same settings" in same
    assert "plan        the same plan" in same
    assert "curves      the same in all 4 steps that both runs have logged, up to step 4" in same
    assert not (run_command.cwd / "curves.png").exists()

    told, _ = run_command("a=one", "against='a=other'", "picture=curves.png", module="foundry.diff", code=1)
    lines = told.splitlines()
    assert lines[0].split() == ["settings", "run", "against"]
    assert lines[1].split() == ["hparams.lr", "0.004", "0.002"]
    assert lines[2].split() == ["hparams.max_steps", "4", "6"]
    assert ["total_steps", "4", "6"] in [line.split() for line in lines]
    losses = [
        [json.loads(line).get("loss") for line in (run_command.cwd / folder / "metrics.jsonl").read_text().splitlines()]
        for folder in ("a=one", "a=other")
    ]
    assert losses[0][0] == losses[1][0]  # before the first update
    first = f"loss {losses[0][1]:.9g} and {losses[1][1]:.9g}"
    assert f"curves      the same up to step 1, different at step 2: {first}" in lines
    results = [json.loads((run_command.cwd / folder / "result.json").read_text()) for folder in ("a=one", "a=other")]
    (row,) = (line.split() for line in lines if line.startswith("val_loss"))
    assert [float(cell) for cell in row[1:3]] == [float(f"{result['val_loss']:.9g}") for result in results]
    assert float(row[3]) == float(f"{results[1]['val_loss'] - results[0]['val_loss']:+.4g}")
    assert (run_command.cwd / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")

    shutil.copytree(run_command.cwd / "a=one", run_command.cwd / "started")
    for name in ("result.json", "metrics.jsonl"):
        (run_command.cwd / "started" / name).unlink()
    told, _ = run_command("started", "a=one", module="foundry.diff", code=1)
    assert "curves      no step that both runs have logged" in told

    for words, line in (
        (["a=one"], "against: has no value; give it as against=..."),
        (["a=one", "nowhere"], "against: is nowhere, which is not a run directory: it has no readable config.yaml"),
        (["a=one", "a=other", "a=again"], "a: is not an option (options: run, against, picture)"),
        (
            ["a=one", "a=other", "picture=curves.png"],
            "picture: is curves.png, which exists; choose another path, or move it away",
        ),
        (["a=one", "a=other", "picture=x.jpg"], "picture: is x.jpg but must be a .png file"),
    ):
        assert run_command(*words, module="foundry.diff", code=2)[1].strip() == line
    (run_command.cwd / "started" / "plan.json").write_text("{")
    _, message = run_command("started", "a=one", module="foundry.diff", code=2)
    assert message.startswith("run: is started: started/plan.json is empty or not JSON")


VALUES = st.sampled_from([None, 0, 1, 1.0, True, 2**70, 0.1, math.nan, math.inf, "one", "1", [1], {"a": 1}])


def write_run(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("{}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=4))
def test_diff_finds_the_first_step_with_different_values(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("runs")
    for side in range(2):
        records = [{"step": step, "loss": 1.0, "own": pair[side], "lr": side} for step, pair in enumerate(values, 1)]
        write_run(folder / str(side), records)
    steps = (step for step, (one, other) in enumerate(values, 1) if one != other and {str(one), str(other)} != {"nan"})
    found = compare(folder / "0", folder / "1").first_difference
    assert (found and found[:2]) == next(((step, "own") for step in steps), None)


@pytest.mark.long
def test_diff_of_long_runs_needs_little_memory(tmp_path):
    record = {"loss": 1.0, **{f"metric_{number}": number / 7 for number in range(20)}}
    for side in ("one", "other"):
        write_run(tmp_path / side, ({**record, "step": step} for step in range(1, 5001)))
    tracemalloc.start()
    compared = compare(tmp_path / "one", tmp_path / "other")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(compared.common_steps) == 5000
    assert peak < 2 * 5000 * 300
